#!/bin/sh
# Table 4: ImageNet-C type by type. The runs and rows are those of Table 1.
. "$(dirname "$0")/common.sh"

ARMS="symmetric rpc4 rpc5 rpc6 rpc2all"
train_vits $ARMS
benchmarks "$ARMS"
compare table4
