#!/bin/sh
# Table 1: five ViTs on ImageNet and on its corrupted, artistic and adversarial relatives.
# Folders of the latter, where there are any: IMAGENET_C, IMAGENET_A, IMAGENET_R, IMAGENET_O.
. "$(dirname "$0")/common.sh"

ARMS="symmetric rpc4 rpc5 rpc6 rpc2all"
train_vits $ARMS
benchmarks "$ARMS"
compare table1
