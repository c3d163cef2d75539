#!/bin/sh
# Table 11: what a step costs. Needs no training; ViT-tiny at 224 px (SCALE=tiny: ViT-nano).
. "$(dirname "$0")/common.sh"

run $PYTHON -m referee.cost $COST
