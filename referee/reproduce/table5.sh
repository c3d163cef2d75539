#!/bin/sh
# Table 5: the Square attack, which asks for no gradient.
. "$(dirname "$0")/common.sh"

train_vits symmetric rpc6
attack "symmetric rpc6" square
compare table5
