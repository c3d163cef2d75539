#!/bin/sh
# App. E.6: ViT-small, symmetric, then RPC fine-tuned from it; beside it the control that the paper
# lacks, as many further epochs of symmetric attention. Tables 7 and 8 are of these runs.
. "$(dirname "$0")/common.sh"

need "ImageNet: train/<wnid>/*.JPEG, val/<wnid>/*.JPEG"
for seed in $SEEDS; do
  first="small_symmetric_s$seed"
  train "$first" train_cls.py $VIT_SMALL --attn symmetric --seed "$seed"
  for arm in rpc4 symmetric; do
    name="small_${arm}_s$seed"
    [ "$arm" = rpc4 ] || name="small_control_s$seed"
    train "$name" train_cls.py $TUNED $(attention "$arm") --seed "$seed" \
      --init_from "$OUT/$first/last.pt"
  done
done
benchmarks "small_symmetric small_rpc4 small_control"
compare table7
