# Read by every script here: sizes, folders, and the verbs train, evaluate, attack, compare.
# Flags are words without blanks; folders, which may have some, stand in quotes.
#
#   sh referee/reproduce/table1.sh                                     # SCALE=small on the embedded scenes
#   DATA=data/cifar10 SEEDS="0 1 2" sh referee/reproduce/table1.sh     # on CIFAR-10, three seeds
#   SCALE=paper DATA=data/imagenet GPUS=4 sh referee/reproduce/table1.sh
#   SCALE=paper DATA=... DRY=1 sh referee/reproduce/table1.sh          # print the commands, run nothing
#
# Several nodes: the same line on each, with NODES=2 NODE=0 (1, ...) HOST=first.node.
# A script that was killed goes on when it is started again: finished runs are skipped, others
# resumed, evaluated rows kept.
set -euf                                            # -f: a * in a folder's name is no pattern
cd "$(dirname "$0")/../.."
SCALE=${SCALE:-small} DATA=${DATA:-} SEEDS=${SEEDS:-0} GPUS=${GPUS:-4} NODES=${NODES:-1}
DRY=${DRY:-} PYTHON=${PYTHON:-python} WHERE=$SCALE
[ "$SCALE" != small ] || [ -z "$DATA" ] || WHERE=small_$(basename "$DATA")
OUT=${OUT:-out/reproduce/$WHERE}
TABLES=${TABLES:-$OUT/tables}
LAUNCH=$PYTHON KEEP="--keep_every 1"                # checkpoints for figures over training

case $SCALE in
tiny)                                               # embedded data, one step: does it run?
  CLS="--num_images 64 --epochs 1 --max_steps 1" VIT_SMALL="$CLS --model nano" TUNED="$CLS"
  FAN="$CLS --batch_size 4 --model fan_tiny"
  SEG=$CLS LM="--steps 1 --context 16 --words 0 --warmup 0"
  FEW="--limit 1 --severities 3" ATTACKED="--limit 1" TOKENS="--limit 40"
  COST="--model nano --rounds 1 --batch_size 1" DATA= ;;
small)                                              # 6 to 8 CPU minutes a ViT of the scenes
  CLS="--model nano" VIT_SMALL="--model micro --epochs 6" TUNED="--model micro --epochs 2"
  FAN="--model fan_tiny --num_images 2000 --epochs 2"
  SEG="" LM=""
  FEW="--limit 200" TOKENS="" ATTACKED="--limit 50" COST="" ;;
paper)
  CLS="--data imagenet" VIT_SMALL="$CLS --model small" FAN="$CLS --model fan_tiny"
  TUNED="$VIT_SMALL --epochs 100 --lr 1e-4 --min_lr 1e-6"
  SEG="--data ade20k" LM="--data wikitext103"
  FEW="" TOKENS="--stride 1" ATTACKED="--limit 50000" COST="--batch_size 256"
  KEEP="--keep_every 25"
  where="--standalone"
  [ "$NODES" = 1 ] || where="--nnodes=$NODES --node_rank=$NODE --master_addr=$HOST"
  LAUNCH="$PYTHON -m torch.distributed.run $where --nproc_per_node=$GPUS" ;;
*) echo "error: SCALE=$SCALE, expected tiny, small or paper" >&2; exit 1 ;;
esac

# With DATA=folder the small runs are on CIFAR-10, CamVid or the small WikiText.
if [ "$SCALE" = small ] && [ -n "$DATA" ]; then
  CIFAR="--data cifar10"
  CLS="$CIFAR --model nano --epochs 5" VIT_SMALL="$CIFAR --model micro --epochs 3"
  TUNED="$CIFAR --model micro --epochs 1" FAN="$CIFAR --model fan_tiny --epochs 1 --max_steps 100"
  SEG="--data camvid --epochs 60" LM="--data wikitext"
fi

# need LAYOUT: the paper's scale needs a folder.
need() {
  [ "$SCALE" != paper ] || [ -d "$DATA" ] || [ -n "$DRY" ] || {
    echo "error: DATA=$DATA is no folder, expected $1" >&2; exit 1; }
}

# attention ARM: the flags of a row of the paper's tables.
attention() {
  case $1 in
  rpc[456]) echo "--attn rpc --n_iter ${1#rpc}" ;;
  rpc2all) echo "--attn rpc --n_iter 2 --lambd 3 --rpc_layers all" ;;
  asym4) echo "--attn rpc_asym --n_iter 4" ;;
  symasym) echo "--attn sym_asym --n_iter 4" ;;
  *) echo "--attn $1" ;;
  esac
}

# run COMMAND...: print it and, unless DRY, do it.
run() {
  line=
  for word in "$@"; do
    case $word in *" "*) word="'$word'" ;; esac
    line="$line $word"
  done
  echo "\$$line"
  [ -n "$DRY" ] || "$@"
}

# train FOLDER SCRIPT FLAGS...: a run, unless it is finished.
train() {
  folder=$OUT/$1 script=$2
  shift 2
  [ -z "$DATA" ] || set -- "$@" --data_dir "$DATA"
  [ ! -e "$folder/finished" ] || return 0
  if [ -e "$folder/last.pt" ]; then
    run $LAUNCH "$script" --resume "$folder"
  else
    run $LAUNCH "$script" "$@" --out_dir "$folder"
  fi
  [ -n "$DRY" ] || touch "$folder/finished"
}

# train_vits ARM...: classifiers, every seed.
train_vits() {
  need "ImageNet: train/<wnid>/*.JPEG, val/<wnid>/*.JPEG"
  for seed in $SEEDS; do
    for arm in "$@"; do
      train "${arm}_s$seed" train_cls.py $CLS $(attention "$arm") $KEEP --seed "$seed"
    done
  done
}

# evaluate "ARM ..." FLAGS...: all of them on the same images; rows go to OUT/rows_<task>.
evaluate() {
  arms=$1 task=vit
  case $arms in seg_*) task=seg ;; lm_*) task=lm ;; esac
  shift
  set -- --out_dir "$OUT/rows_$task" --resume "$@" --ckpt
  for arm in $arms; do
    for seed in $SEEDS; do set -- "$@" "$OUT/${arm}_s$seed"; done
  done
  run $LAUNCH eval_robust.py "$@"
}

# benchmarks "ARM ...": clean, corrupted, and the folders that IMAGENET_C, _A, _R, _O name.
benchmarks() {
  models=$1 names="clean corruptions"
  set -- $FEW
  [ -z "${IMAGENET_C:-}" ] || set -- "$@" --corrupted_dir "$IMAGENET_C"
  for name in A R O; do
    eval "folder=\${IMAGENET_$name:-}"
    [ -n "$folder" ] || continue
    name=imagenet_$(echo $name | tr ARO aro)
    names="$names $name"
    set -- "$@" "--$name" "$folder"
  done
  evaluate "$models" "$@" --measures $names
}

# attack "ARM ..." "NAME ...": in the paper's conditions, which are not pixels: docs/robustness.md.
attack() {
  arms=$1 names=$2
  set --
  for name in $names; do
    case $SCALE-$name in
    tiny-pgd | tiny-cw | tiny-spsa) name="$name steps=1" ;;
    small-cw) name="cw steps=100" ;;
    small-spsa) name="spsa steps=10" ;;
    tiny-square) name="$name queries=5" ;;
    tiny-autoattack) continue ;;                    # minutes even of one image
    small-autoattack) name="autoattack queries=500" ;;
    esac
    set -- "$@" "$name"
  done
  evaluate "$arms" --preset paper $ATTACKED --measures "$@"
}

# compare TABLE: the paper's number beside ours.
compare() {
  [ -n "$DRY" ] ||
    $PYTHON -m referee.reproduce.compare "$1" --rows "$OUT" --scale "$SCALE" --out "$TABLES/$1.md"
}
