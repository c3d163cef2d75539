#!/bin/sh
# Table 3: language models on WikiText-103, clean and with words swapped.
. "$(dirname "$0")/common.sh"

need "WikiText-103: wiki.train.tokens, wiki.valid.tokens, wiki.test.tokens"
LAYERS="--rpc_layers 0"
[ "$SCALE" != paper ] || LAYERS="--rpc_layers 0-3"
for seed in $SEEDS; do
  train "lm_symmetric_s$seed" train_lm.py $LM --attn symmetric --seed "$seed"
  train "lm_rpc4_s$seed" train_lm.py $LM --attn rpc --n_iter 4 $LAYERS --seed "$seed"
done
evaluate "lm_symmetric lm_rpc4" $TOKENS --measures perplexity
compare table3
