#!/bin/sh
# Fig. 5: the test of Fig. 2, layer by layer.
. "$(dirname "$0")/common.sh"

sh referee/reproduce/fig2.sh
run $PYTHON -m referee.plot kpca "$OUT/kpca"
