#!/bin/sh
# App. E.1, Fig. 4: Scaled Attention beside softmax attention, last epoch.
. "$(dirname "$0")/common.sh"

train_vits softmax scaled_s scaled_alpha
compare appE1
