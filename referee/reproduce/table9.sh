#!/bin/sh
# Table 9: FAN-ViT-tiny, clean and corrupted.
. "$(dirname "$0")/common.sh"

need "ImageNet: train/<wnid>/*.JPEG, val/<wnid>/*.JPEG"
for seed in $SEEDS; do
  train "fan_symmetric_s$seed" train_cls.py $FAN --attn symmetric --seed "$seed"
  train "fan_rpc4_s$seed" train_cls.py $FAN --attn rpc --n_iter 4 --seed "$seed"
done
benchmarks "fan_symmetric fan_rpc4"
compare table9
