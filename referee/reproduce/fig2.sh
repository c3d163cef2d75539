#!/bin/sh
# Fig. 2: are learned values eigenvectors? Mean over layers and heads, and the eigenvalues.
. "$(dirname "$0")/common.sh"

train_vits softmax
set --
for seed in $SEEDS; do set -- "$@" "$OUT/softmax_s$seed"; done
run $PYTHON -m referee.kernel_pca --exp gamma,eigstats --out_dir "$OUT/kpca" --ckpt "$@"
compare fig2
