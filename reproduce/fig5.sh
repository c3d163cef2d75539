#!/bin/sh
# Fig. 5: the test of Fig. 2, layer by layer.
. "$(dirname "$0")/common.sh"

sh reproduce/fig2.sh
run $PYTHON -m studies.plot kpca "$OUT/kpca"
