#!/bin/sh
# Fig. 1: the projection loss over training, as printed, and what can be measured soundly.
. "$(dirname "$0")/common.sh"

train_vits softmax
for seed in $SEEDS; do
  run $PYTHON -m studies.kernel_pca --exp jproj --out_dir "$OUT/kpca" \
    --ckpt "$OUT/softmax_s$seed"/epoch_*.pt
done
hours
