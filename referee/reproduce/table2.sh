#!/bin/sh
# Table 2: the same five under seven attacks, PGD and FGSM at the largest budget.
. "$(dirname "$0")/common.sh"

ARMS="symmetric rpc4 rpc5 rpc6 rpc2all"
train_vits $ARMS
attack "$ARMS" "pgd fgsm spsa sld cw noise autoattack"
compare table2
