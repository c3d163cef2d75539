#!/bin/sh
# Table 12: RPC in attention that is not symmetric.
. "$(dirname "$0")/common.sh"

ARMS="softmax asym4 symasym"
train_vits $ARMS
benchmarks "$ARMS"
compare table12
