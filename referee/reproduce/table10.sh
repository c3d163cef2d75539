#!/bin/sh
# Table 10: FAN-ViT-tiny under PGD and FGSM. Table 9 trains it.
. "$(dirname "$0")/common.sh"

sh referee/reproduce/table9.sh
attack "fan_symmetric fan_rpc4" "pgd fgsm"
compare table10
