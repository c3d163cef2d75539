#!/bin/sh
# Fig. 3: accuracy against the budget of PGD and FGSM (left), Scaled Attention (right).
. "$(dirname "$0")/common.sh"

train_vits symmetric rpc6 softmax scaled_s scaled_alpha
attack "symmetric rpc6" "pgd fgsm"
run $PYTHON -m referee.plot robust "$OUT/rows_vit" --run symmetric_s rpc6_s
compare appE1
