"""Compare every part on a GPU with the same part on the CPU.

    python -m pytest tests/test_gpu.py -n 8 --dist load     # ends in a table for the record

Without a GPU, only -n0 runs these tests, with the CPU in its place, to try the code of the tests.
"""

import copy
import json
import math
import os
import time
import warnings
from collections import Counter
from dataclasses import asdict
from functools import partial
from pathlib import Path

import pytest
import torch

import common
import eval_robust
import train_cls
import train_lm
import train_seg
from attention import FORMS, SelfAttention, rpc_attention
from fixtures import ROOT
from data.augment import augment_uint8
from data.shapes import SHAPES, load_shapes
from models import load_classifier
from processes import group
from robust.adaptive import adaptive_apgd, adaptive_autoattack
from robust.corruptions import NAMES, corrupt
from runs import call, flags, log, make_pairs, make_text
from test_attacks import ATTACKS, EPS
from vit import SIZES, ViT, ViTConfig

GPUS = torch.cuda.device_count()
KINDS = ("softmax", "symmetric", "rpc", "rpc_asym", "scaled_s", "scaled_alpha")
pytestmark = pytest.mark.skipif(not GPUS and "PYTEST_XDIST_WORKER" in os.environ,
                                reason="compares a GPU with the CPU")
needs_gpu = pytest.mark.skipif(not GPUS, reason="needs a GPU")
@pytest.fixture
def device():
    return torch.device("cuda" if GPUS else "cpu")


@pytest.fixture
def note(record_property):
    """Return note(part, found), which adds a row to the table that fixtures.py prints."""
    began = time.time()

    def write(part, found):
        record_property("note", [part, found, f"{time.time() - began:.1f}"])
    return write


def error(found, expected):
    """Return ||found - expected|| / ||expected|| over lists of tensors."""
    a, b = (torch.cat([x.detach().cpu().double().flatten() for x in xs])
            for xs in (found, expected))
    return ((a - b).norm() / b.norm()).item()


# --- attention ------------------------------------------------------------------------------------

CASES = [(attn, form, causal) for attn in KINDS
         for form in (FORMS if "rpc" in attn else [""])
         for causal in ([False] if attn == "scaled_s" else [False, True])]


@pytest.mark.parametrize("attn,form,causal", CASES)
def test_attention_equals_float64_within_rounding(attn, form, causal, device, note):
    """PAP's gradient jumps if an entry crosses the threshold: in bf16, rounding moves 0.2 %."""
    torch.manual_seed(0)
    pap = dict(form=form, lambd=0.5 if form == "released" else 0.3)
    layer = SelfAttention(192, 3, attn, pap=pap if form else None, causal=causal, num_tokens=65)
    with torch.no_grad():
        layer.qkv.weight *= 1.2                                 # keys of standard deviation 0.7
        for p in layer.learned.parameters() if layer.learned else ():
            p.normal_(0, 0.1)
    x, along = torch.randn(2, 4, 65, 192)

    def outcome(device, dtype, amp):
        m, to = copy.deepcopy(layer).to(device, dtype), dict(device=device, dtype=dtype)
        z = x.to(**to, copy=True).requires_grad_()
        with torch.autocast(torch.device(device).type, torch.bfloat16, enabled=amp):
            y = m(z)
        (y * along.to(**to)).sum().backward()
        return [y], [z.grad, *(p.grad for p in m.parameters())]

    exact = outcome("cpu", torch.float64, False)
    single, half = (list(map(error, outcome(device, torch.float32, amp), exact))
                    for amp in (False, True))
    note(f"{attn} {form}{' causal' * causal}".replace("  ", " "),
         "output, gradients off by {:.0e}, {:.0e}; in bf16 {:.1e}, {:.1e}".format(*single, *half))
    assert single[0] < 1e-5 and single[1] < (0.05 if form else 1e-4)
    assert half[0] < 0.01 and half[1] < (0.2 if form else 0.01)


def written_out(k, v, n_iter=4, lambd=4.0):
    """Compute Algorithm 1 like the released code, which keeps a matrix (B, H, N, N) per step."""
    H, N, D = k.shape[1:]
    mu = N * H * D / (4 * k.abs().sum((-2, -1), keepdim=True))
    L = Y = torch.zeros_like(k)
    for _ in range(n_iter):
        move = k - L + Y / mu
        S = move.sign() * (move.abs() - lambd * mu).clamp(min=0)
        K2 = k - S - Y / mu
        L = torch.softmax(K2 @ K2.mT / math.sqrt(D), -1) @ v
        Y = Y + mu * (k - L - S)
    return L


@needs_gpu
def test_rpc_needs_a_third_of_the_memory(device, note):
    torch.manual_seed(0)
    k, v = torch.randn(2, 32, 3, 1025, 64, device=device)
    outputs, peaks = [], []
    for function in (rpc_attention, written_out):
        a, b = (t.clone().requires_grad_() for t in (k, v))
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        h = function(a, b)
        h.square().sum().backward()
        peaks.append((torch.cuda.max_memory_allocated() - before) / 2 ** 20)
        outputs.append([h.detach()])
    note("RPC, 32 x 3 heads, N = 1025", "{:.0f} MB, written out {:.0f} MB".format(*peaks))
    assert error(*outputs) < 1e-4 and peaks[0] < peaks[1] / 3


# --- the trainers ---------------------------------------------------------------------------------

SCRIPTS = dict(cls=train_cls, lm=train_lm, seg=train_seg)
STEPS = 20
# These runs draw the same random numbers on every device: no dropout, no drop path.
SMALL = dict(
    cls="--model nano --num_images 64 --image_size 16 --patch_size 4 --batch_size 16 --epochs 5 "
        "--lr 1e-3 --num_ops 2 --erase 0.25 --pad 2 --mixup 0.8 --cutmix 1",
    lm="--data_dir text --context 16 --batch_size 8 --steps 20 --eval_every 10 --words 5 --warmup "
       "5 --dropout 0 --cutoffs 5,10",
    seg="--data ade20k --data_dir pairs --num_classes 4 --model nano --size 32 --patch_size 8 "
        "--batch_size 4 --epochs 7 --lr 1e-3 --dropout 0 --drop_path 0 --num_workers 0")
# The bf16 runs have dropout or drop path, whose masks differ between devices.
BF16 = dict(cls="--drop_path 0.1 --num_ops 0 --erase 0 --mixup 0 --cutmix 0 --lr 3e-3 --adv_eps "
                "1/510 --adv_steps 2", lm="--dropout 0.1 --lr 5e-3", seg="--dropout 0.1")
each = pytest.mark.parametrize("name", SCRIPTS)


def train(name, device, out_dir, *more, steps=STEPS):
    """Train in float32, unless `more` has --amp; return the loss of each step."""
    call(SCRIPTS[name].main, SMALL[name], "--no-amp --no-compile --device", [device], *more,
         max_steps=steps, out_dir=out_dir)
    return list(log(out_dir).values())


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Yield (folder, {name: losses}): data, and the losses of one run per trainer on the device."""
    folder, device = tmp_path_factory.mktemp("runs"), "cuda" if GPUS else "cpu"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        make_text()
        make_pairs()
        patch.setattr(common, "LOG_EVERY", 1)
        yield folder, {name: train(name, device, name) for name in SCRIPTS}


@pytest.fixture
def plain(runs, monkeypatch):
    monkeypatch.chdir(runs[0])
    return runs[1]


def apart(losses, others):
    """Return the largest difference between the losses of two runs."""
    return max(abs(a - b) for a, b in zip(losses, others, strict=True))


@each
def test_bf16_steps_stay_finite_and_learn(name, device, plain, note):
    losses = train(name, device, f"{name}_amp", BF16[name], "--amp", steps=20)
    first, last = sum(losses[:5]) / 5, sum(losses[-5:]) / 5
    note(f"train_{name}, bf16", f"loss {first:.3f}, then {last:.3f}")
    assert last < 0.98 * first


@each
def test_run_begun_on_cpu_resumes_on_gpu(name, device, plain, note):
    train(name, "cpu", f"{name}_begun", steps=STEPS // 2)
    call(SCRIPTS[name].main, "--device", [device], max_steps=STEPS, resume=f"{name}_begun")
    found = apart(plain[name], list(log(f"{name}_begun").values()))
    note(f"train_{name}, begun on the CPU", f"losses {found:.1e} from the whole run's")
    assert found < 1e-3


@pytest.mark.parametrize("compiling", ["--no-compile", pytest.param("--compile", marks=needs_gpu)])
@each
def test_one_process_per_gpu_has_the_same_losses(name, compiling, device, plain, note):
    """With --compile, the processes run CUDA graphs."""
    own = "--mixup 0 --cutmix 0" if name == "cls" else ""   # a process mixes its own images
    world = max(n for n in (1, 2, 4, 8) if n <= max(GPUS, 1))           # divides every batch size
    run = flags(SMALL[name], own, "--batch_size 8 --no-amp --device", [device], max_steps=STEPS)
    ends = [f"{name}{compiling}_{end}" for end in ("many", "single")]
    group(SCRIPTS[name].main, [*run, compiling, "--out_dir", ends[0]], world=world)
    call(SCRIPTS[name].main, run, "--no-compile", out_dir=ends[1])
    found = apart(*(list(log(end).values()) for end in ends))
    note(f"{name} {compiling}, torchrun, {world} processes", f"losses {found:.1e} from one's")
    assert found < 1e-3


@needs_gpu
@each
def test_cuda_graphs_have_the_same_losses(name, device, plain, note):
    """Everybody trains with CUDA graphs on a GPU."""
    torch.compiler.reset()
    found = apart(plain[name], train(name, device, f"{name}_graphs", "--compile"))
    note(f"train_{name}, CUDA graphs", f"losses {found:.1e} from plain ones")
    assert found < 1e-3


@needs_gpu
def test_adversarial_training_in_cuda_graphs_is_equal(device, plain, note):
    """One graph attacks with frozen weights, and another graph trains them."""
    losses = []
    for how in ("--no-compile", "--compile"):
        torch.compiler.reset()
        losses.append(train("cls", device, f"adv{how}", "--adv_eps 2/255 --adv_steps 2 --num_ops 0 "
                            "--erase 0", how))
    found = apart(*losses)
    note("train_cls --adv_eps, CUDA graphs", f"losses {found:.1e} from plain ones")
    assert found < 1e-3


@needs_gpu
@each
def test_cuda_graphs_resume_with_masks_in_bf16(name, device, plain, note):
    """The masks of drop path and dropout are drawn in the graph, from the seed of the step."""
    run = ("--amp --compile", dict(cls="--drop_path 0.1", lm="--dropout 0.1",
                                   seg="--drop_path 0.1 --dropout 0.1")[name])
    losses = []
    for end, steps in (("whole", STEPS), ("parts", STEPS // 2)):
        torch.compiler.reset()
        losses.append(train(name, device, f"{name}_masks_{end}", *run, steps=steps))
    torch.compiler.reset()
    call(SCRIPTS[name].main, max_steps=STEPS, resume=f"{name}_masks_parts", device=device)
    found = apart(losses[0], list(log(f"{name}_masks_parts").values()))
    note(f"train_{name}, CUDA graphs resumed", f"losses {found:.1e} from the whole run's")
    assert found < 0.01                                     # rounding of bf16; other masks: 0.1


@needs_gpu
@each
def test_a_step_waits_for_the_gpu_once(name, device, plain, note, monkeypatch):
    """Count the waits of ten more steps without checkpoints, with PyTorch's sync check."""
    monkeypatch.setattr(common, "save", lambda *args: None)
    monkeypatch.setattr(common, "LOG_EVERY", 100)
    waits = []
    for steps in (10, 20):
        torch.cuda.set_sync_debug_mode("warn")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            train(name, "cuda", f"{name}_waits_{steps}", "--eval_every 100", steps=steps)
        torch.cuda.set_sync_debug_mode("default")
        waits.append(Counter(f"{Path(one.filename).name}:{one.lineno}" for one in caught
                             if "synchronizing" in str(one.message)))
    more = waits[1] - waits[0]
    note(f"train_{name}, waits", f"{more.total() / 10:.1f} per step")
    assert more.total() <= 20, more.most_common()           # one per step, and one per epoch


# --- changed images -------------------------------------------------------------------------------

@pytest.mark.parametrize("name", NAMES)
def test_a_corruption_equals_the_cpus_within_a_level(name, device, note):
    images, worst = load_shapes("test", 8).images, 0.0
    wide = torch.nn.functional.interpolate(images.float(), (48, 80)).byte()     # another size
    for pixels, severity in (images, 1), (images, 5), (wide, 3):
        found = corrupt(pixels.to(device), name, severity)
        assert found.device.type == device.type
        off = (found.cpu().double() - corrupt(pixels, name, severity)).abs()
        assert (off > 1).double().mean() < 1e-3
        worst = max(worst, off.mean().item())
    note(f"corruption {name}", f"{worst:.4f} grey levels from the CPU's")
    assert worst < 0.05


def test_training_images_equal_the_cpus(device, note):
    """RandAugment rounds at most 1 of 10,000 pixels differently."""
    images, positions = load_shapes("test", 256).images, torch.arange(256)
    off = (augment_uint8(images.to(device), positions, 0, 4, 2, flip=True).cpu()
           != augment_uint8(images, positions, 0, 4, 2, flip=True)).double().mean().item()
    note("RandAugment", f"{off:.1e} of the pixels differ")
    assert off < 1e-4


LARGER = dict(noise=0.3, sld=4.0, square=32 / 255, spsa=32 / 255)           # others: EPS
HERE = ATTACKS | {"adaptive_apgd": partial(adaptive_apgd, steps=3),
                  "adaptive_aa": partial(adaptive_autoattack, steps=2, queries=10, num_targets=2)}


@pytest.mark.parametrize("name", HERE)
def test_an_attack_is_as_strong_as_on_cpu(name, device, note):
    """Accuracy agrees within 1 of 20 images, distances agree within 10 %."""
    n, attack, eps = 64, HERE[name], LARGER.get(name, EPS)
    split = load_shapes("test", n)
    model = load_classifier(common.load(ROOT / "weights/shapes_rpc.pt"))
    right, far = [], []
    for where in (torch.device("cpu"), device):
        model.to(where)
        x, y = split.images.to(where).float() / 255, split.labels.to(where)
        adv = attack(model, x, y, eps)
        moved = (adv - x).flatten(1)
        assert adv.device.type == where.type and 0 <= adv.min() and adv.max() <= 1
        size = moved.abs().sum(1).max() if name == "sld" else moved.abs().max()
        assert name == "cw" or size <= eps * (1 + 1e-4)                     # sld: the L1 norm
        with torch.no_grad():
            right.append((model(adv).argmax(1) == y).sum().item())
        far.append(moved.norm(dim=1).mean().item())
    note(f"attack {name}", f"{right[1]} of {n} stay right, {right[0]} on the CPU; they move by "
         f"{far[1]:.3f}, {far[0]:.3f}")
    assert abs(right[0] - right[1]) <= max(1, n // 20) and abs(far[0] - far[1]) <= 0.1 * far[0]


@needs_gpu
def test_the_evaluators_batch_fits_at_patch_4(device, note, monkeypatch, tmp_path):
    """Small patches need the most memory per pixel: PGD on 1,024 scenes of 32 pixels."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    model = ViT(ViTConfig(**SIZES["tiny"], image_size=32, patch_size=4, num_classes=10, attn="rpc",
                          rpc_layers=range(12)))
    common.save("tiny.pt", dict(
        task="classification", architecture="vit", args=dict(data="shapes"), classes=list(SHAPES),
        model=model.state_dict(), model_config=asdict(model.config)))
    torch.cuda.reset_peak_memory_stats()
    call(eval_robust.main, "--ckpt tiny.pt --measures pgd --eps 1/255 --steps 2 --limit 1024 "
         "--device cuda")
    used = torch.cuda.max_memory_allocated() / torch.cuda.get_device_properties(0).total_memory
    note("evaluator, ViT-tiny, patch 4", f"PGD used {100 * used:.0f} % of the memory")
    assert used < 0.9


EVALUATIONS = {
    "shapes_rpc": (eval_robust, "--ckpt", "--measures clean noise fgsm pgd fog glass_blur --eps "
                   "2/255 --steps 5 --severities 1 5 --limit 40"),
    "seg_shapes_rpc": (train_seg, "--eval_only", "--severities 5 --limit 8"),
    "pydoc_rpc": (train_lm, "--eval_only", "--limit 2000")}


@pytest.mark.parametrize("ckpt", EVALUATIONS)
def test_the_evaluators_rows_are_the_cpus(ckpt, device, note, tmp_path, monkeypatch):
    """Accuracies agree within two images; losses, distances, perplexities and IoU within 2 %."""
    monkeypatch.chdir(tmp_path)
    rows, (script, flag, more) = [], EVALUATIONS[ckpt]
    for i, where in enumerate(("cpu", device)):
        call(script.main, flag, [ROOT / f"weights/{ckpt}.pt"], more, "--device", [where],
             out_dir=f"rows_{i}")
        text = (tmp_path / f"rows_{i}" / "results.jsonl").read_text()
        rows.append([json.loads(line) for line in text.splitlines()])
    compared, worst = 0, 0.0
    for a, b in zip(*rows, strict=True):
        for field, value in a.items():
            numbers = value if isinstance(value, list) else [value]
            if field == "seconds" or not all(type(x) is float for x in numbers):
                continue
            x, y = torch.tensor(numbers), torch.tensor(b[field])
            off = (x - y).abs() / (250 if field in ("top1", "top5") else x.abs() + 0.01)
            compared, worst = compared + 1, max(worst, off.max().item())
            assert worst <= 0.02, (a["name"], field, value, b[field])
    note(f"evaluator, {ckpt}", f"{compared} numbers of {len(rows[0])} rows within {worst:.2%}")
    assert compared >= len(rows[0])


# --- torch.compile --------------------------------------------------------------------------------
# Last, because the tests above fork on a CPU, and compiling starts threads.

BACKEND = "inductor" if GPUS else "aot_eager"   # on a CPU, Inductor compiles for half a minute


def counting(backend, graphs):
    """Return a backend of torch.compile that also appends every graph to `graphs`."""
    inner = torch._dynamo.lookup_backend(backend)

    def compile_graph(graph, inputs):
        graphs.append(graph)
        return inner(graph, inputs)
    return compile_graph


@pytest.mark.parametrize("attn", [*KINDS, "sym_asym"])
def test_a_network_compiles_to_one_equal_graph(attn, device, note, monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))    # an empty cache
    torch.compiler.reset()
    torch.manual_seed(0)
    model, graphs = ViT(ViTConfig(16, 4, 5, 32, 2, 2, attn=attn)).to(device), []
    compiled = torch.compile(model, backend=counting(BACKEND, graphs))
    for _ in range(2):                                          # compiles in the first pass only
        x, found = torch.rand(4, 3, 16, 16, device=device), []
        for net in (model, compiled):
            model.zero_grad()
            y = net(x)
            y.square().sum().backward()
            found.append([y, *(p.grad for p in model.parameters())])
        off = error(*found)
        assert off < 1e-4 and len(graphs) == 1
    compiled.eval()
    with torch.no_grad():                                       # full batches and smaller ones
        for b in (4, 4, 3, 2):
            off = max(off, error([compiled(x[:b])], [model(x[:b])]))
    note(f"compile {attn}, {BACKEND}",
         f"{off:.0e} from eager; 1 graph to train, {len(graphs) - 1} to evaluate")
    assert off < 1e-4 and len(graphs) <= 3


@each
def test_a_run_with_compile_has_the_same_losses(name, device, plain, note, monkeypatch):
    graphs, real = [], torch.compile
    backend = counting("inductor" if GPUS else "eager", graphs)
    monkeypatch.setattr(torch, "compile", lambda model, mode: real(model, backend=backend))
    torch.compiler.reset()
    found = apart(plain[name], train(name, device, f"{name}_compile", "--compile"))
    note(f"train_{name} --compile", f"losses {found:.1e} from plain ones; {len(graphs)} graphs")
    assert found < 1e-3 and (len(graphs) == 1 if name == "lm" else graphs)  # cls, seg: any number
