#!/bin/sh
# Fig. 1: the projection loss over training, as printed, and what can be measured soundly.
. "$(dirname "$0")/common.sh"

train_vits softmax
set --
set +f                                              # here * is a pattern
for seed in $SEEDS; do set -- "$@" "$OUT/softmax_s$seed"/epoch_*.pt; done
set -f
run $PYTHON -m referee.kernel_pca --exp jproj --out_dir "$OUT/kpca" --ckpt "$@"
run $PYTHON -m referee.plot kpca "$OUT/kpca"
