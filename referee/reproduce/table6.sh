#!/bin/sh
# Table 6: Segmenter on ADE20K, clean and corrupted. At the paper's scale the encoders are those of
# Table 1: run table1.sh first; DATA is then ADEChallengeData2016.
. "$(dirname "$0")/common.sh"

need "ADE20K: images/{training,validation}/*.jpg, annotations/{training,validation}/*.png"
ARMS="symmetric rpc4 rpc5 rpc6 rpc2all"
for seed in $SEEDS; do
  for arm in $ARMS; do
    set -- $(attention "$arm")
    [ "$SCALE" != paper ] || set -- --backbone "$OUT/${arm}_s$seed"
    train "seg_${arm}_s$seed" train_seg.py $SEG "$@" --seed "$seed"
  done
done
evaluate "seg_symmetric seg_rpc4 seg_rpc5 seg_rpc6 seg_rpc2all" $FEW --measures clean corruptions
compare table6
