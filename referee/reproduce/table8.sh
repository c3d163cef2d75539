#!/bin/sh
# Table 8: ViT-small under PGD and FGSM. The columns of the paper are probably swapped.
. "$(dirname "$0")/common.sh"

sh referee/reproduce/appE6.sh
attack "small_symmetric small_rpc4 small_control" "pgd fgsm"
compare table8
