#!/bin/sh
# Fig. 2: are learned values eigenvectors? Mean over layers and heads, and the eigenvalues.
. "$(dirname "$0")/common.sh"

train_vits softmax
for seed in $SEEDS; do
  run $PYTHON -m studies.kernel_pca --exp gamma,eigstats --out_dir "$OUT/kpca" \
    --ckpt "$OUT/softmax_s$seed"
done
compare fig2
