// The live page: its state, which a link holds, its controls, and the attack.

const $ = id => document.getElementById(id);
const data = JSON.parse($("page-data").textContent);                  // {classes, scenes, labels}
const STANDARD = {network: "rpc", scene: 0, kind: "noise", amount: 0, paint: "0".repeat(64), lambd: 4, n_iter: 4,
                  form: "released", layers: [0], temperature: 1, eps: 8, seed: 0};
const state = {...STANDARD};
let own = null, token = 27, seen = null, touched = false;             // seen: what lookInside found

const undamaged = () => state.scene < 0 ? own : data.scenes[state.scene];


// --- the state as the link's fragment, and back ---------------------------------------------------

const RANGE = {amount: [0, 1], lambd: [0, Infinity], n_iter: [1, 12], temperature: [0.25, 4], eps: [0, 8], seed: [0, 9999]};
const WHOLE = ["scene", "n_iter", "seed"];
const KNOWN = {network: network.names, form: Object.keys(FORMS), kind: ["noise", "fog"]};

function fragment() {
  const changed = Object.keys(STANDARD).filter(key => String(state[key]) !== String(STANDARD[key]));
  return "#try" + changed.map(key => `&${key}=${state[key]}`).join("");
}

function readFragment() {                             // a value that cannot be is left out
  if (!/^#try(&|$)/.test(location.hash)) return;
  Object.assign(state, STANDARD);
  for (const [key, text] of new URLSearchParams(location.hash.slice(5))) {
    const x = Number(text), [low, high] = RANGE[key] ?? [own ? -1 : 0, data.scenes.length - 1];
    if (KNOWN[key]) { if (KNOWN[key].includes(text)) state[key] = text; }
    else if (key === "paint") { if (/^[0-3]{64}$/.test(text)) state.paint = text; }
    else if (key === "layers") state.layers = [0, 1, 2, 3].filter(i => text.includes(i));
    else if (key in STANDARD && x >= low && x <= high) state[key] = WHOLE.includes(key) ? Math.round(x) : x;
  }
}


// --- work in slices: after 8 ms the browser may draw and listen ------------------------------------

const channel = new MessageChannel(), waiting = [];
let since = performance.now();
channel.port1.onmessage = () => waiting.shift()();

async function breathe() {
  if (performance.now() - since < 8) return;
  await new Promise(done => { waiting.push(done); channel.port2.postMessage(0); });
  since = performance.now();
}

async function finish(generator) {
  for (;;) {
    const {done, value} = generator.next();
    if (done) return value;
    await breathe();
  }
}

const ask = (...of) => finish(network.start(...of));  // logits of (name, pixels, setting, ...)


// --- look and show --------------------------------------------------------------------------------

function drawInside() {
  drawPixels($("picture"), seen.pixels);
  drawFrames($("picture"), seen.now.paint, token);
  if (!attacks.length) document.querySelectorAll("#duel canvas").forEach((canvas, i) => drawPixels(canvas, seen.pixels, i % 2 ? () => 0.5 : undefined));
  $("picture").setAttribute("aria-label", `the picture that is shown; framed: ${where(token)}`);
  drawMaps($("maps"), seen, token);
  $("words").textContent = sentence(seen, token);
}

function drawAnswer() {
  const {answer, before, now, residuals, entropies, nulls} = seen, kind = COLOUR[now.network];
  const best = answer.indexOf(Math.max(...answer)), first = before.indexOf(Math.max(...before));
  drawBars($("bars"), seen, data.classes);
  $("answer-title").textContent = `${TITLE[now.network]}: ${data.classes[best]}, ${percent(answer[best])}`;
  $("truth").textContent = (best === first ? "" : `Without damage: ${data.classes[first]}. `) +
    (now.scene < 0 ? "" : `The scene shows a ${data.classes[data.labels[now.scene]]}.`);
  const title = "entropy of attention, nats";
  $("curves").innerHTML = nulls
    ? curve("residual |K − S − L| / |K|", residuals, kind, nulls.residual, "step") + curve(title, entropies, kind, nulls.entropy, "step")
    : curve(title, entropies, kind, {uniform: Math.log(N)}, "layer");
  $("meaning").textContent = meaning(seen);
}

let busy = false, again = false;
async function changed() {                            // while one look is taken, the next waits
  showControls();
  again = true;
  if (busy) return;
  busy = true;
  while (again) {
    again = false;
    seen = await lookInside({...state}, undamaged());
    drawInside();
    drawAnswer();
    await breathe();
  }
  busy = false;
  if (touched) history.replaceState(null, "", fragment());
  document.documentElement.dataset.live = fragment();                 // drawn, for tests
}


// --- controls -------------------------------------------------------------------------------------

function showControls() {
  for (const id of ["network", "scene", "kind", "amount", "n_iter", "form", "eps", "seed"]) $(id).value = state[id];
  $("lambd").value = toSlider(state.lambd);
  $("temperature").value = Math.log2(state.temperature);
  const shown = {lambd: showLambda(state.lambd), temperature: state.temperature, n_iter: state.n_iter,
                 amount: percent(state.amount), eps: `${state.eps}/255`};
  for (const [id, text] of Object.entries(shown)) {
    $(`${id}-value`).value = text;
    $(id).setAttribute("aria-valuetext", text);
  }
  const pap = state.network === "rpc";
  document.querySelectorAll(".pap").forEach(label => { label.hidden = !pap; });
  document.querySelectorAll(".plain").forEach(label => { label.hidden = pap; });
  $("layers-title").textContent = pap ? "layers with PAP" : "layers with this temperature";
  document.querySelectorAll("#layers input").forEach((box, i) => { box.checked = state.layers.includes(i); });
}

function set(values) {
  Object.assign(state, values);
  touched = true;
  changed();
}

function listen(id, read) {
  $(id).addEventListener("input", event => set({[id]: read(event.target.value)}));
}

function paint(i) {
  const digit = $("brush").value;
  if (digit && state.paint[i] !== digit) set({paint: state.paint.slice(0, i) + digit + state.paint.slice(i + 1)});
}

function onPointer(event) {                           // on the picture or a map: which patch?
  if (event.target.tagName !== "CANVAS" || !seen) return;
  const box = event.target.getBoundingClientRect();
  const cell = x => Math.min(Math.max(Math.floor(8 * x), 0), 7);
  const next = 8 * cell((event.clientY - box.top) / box.height) + cell((event.clientX - box.left) / box.width);
  if (event.target === $("picture") && event.buttons) paint(next);
  if (next === token) return;
  token = next;
  drawInside();
}

function onKey(event) {
  const step = {ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1]}[event.key];
  const inside = x => Math.min(Math.max(x, 0), 7);
  if (step) token = inside(token % 8 + step[0]) + 8 * inside(Math.floor(token / 8) + step[1]);
  else if (event.key === "Enter" || event.key === " ") paint(token);
  else return;
  event.preventDefault();
  event.stopPropagation();
  drawInside();
}

async function takePicture(file) {
  if (!file) return;
  try {
    const bitmap = await createImageBitmap(file), canvas = document.createElement("canvas");
    [canvas.width, canvas.height] = [bitmap.width, bitmap.height];
    const context = canvas.getContext("2d");
    context.drawImage(bitmap, 0, 0);
    own = await finish(resized(context.getImageData(0, 0, bitmap.width, bitmap.height).data, bitmap.width, bitmap.height));
  } catch (error) {
    $("meaning").textContent = `${file.name} cannot be read as a picture: ${error.message}`;
    return;
  }
  if (!$("scene").querySelector("[value='-1']")) $("scene").add(new Option("your picture", -1), 0);
  set({scene: -1});
}


// --- the attack -----------------------------------------------------------------------------------

const QUERIES = 1000, calm = matchMedia("(prefers-reduced-motion: reduce)");
let attacks = [], attacking = false;

async function attack() {
  const now = {...state}, pixels = damaged(undamaged(), now);
  attacks = network.names.map(name => ({name, search: new SquareAttack(pixels, now.eps / 255, now.seed)}));
  attacking = true;
  [$("start").disabled, $("stop").disabled] = [true, false];
  for (let query = 0, drawn = 0; attacking && query <= QUERIES; query++) {
    for (const one of attacks.filter(({search}) => !search.fallen)) {
      const logits = await ask(one.name, one.search.propose(), now);
      one.answer = logits.indexOf(Math.max(...logits));
      one.first ??= one.answer;                       // to the untouched picture
      one.search.tell(margin(logits, one.first));
    }
    if (attacks.every(({search}) => search.fallen)) break;
    if (performance.now() - drawn < (calm.matches ? 1000 : 100)) continue;
    drawn = performance.now();
    drawAttack(now);
  }
  attacking = false;
  [$("start").disabled, $("stop").disabled] = [false, true];
  drawAttack(now);
}

function drawAttack(now) {
  attacks.forEach(({name, search, first, answer}, i) => {
    const figure = $("duel").children[i], [picture, difference] = figure.querySelectorAll("canvas");
    drawPixels(picture, search.best);
    drawPixels(difference, search.best, (x, at) => Math.min(Math.max(0.5 + 16 * (x - search.pixels[at]), 0), 1));
    picture.setAttribute("aria-label", `the picture as ${TITLE[name]} gets it`);
    difference.setAttribute("aria-label", "what was changed, 16 times amplified");
    figure.querySelector("figcaption").textContent = `${TITLE[name]}, query ${search.margins.length - 1}: ` + (search.fallen
      ? `${data.classes[first]} became ${data.classes[answer]}`
      : `still ${data.classes[first]}, margin ${search.margins.at(-1).toFixed(2)}`);
  });
  $("margins").innerHTML = marginCurves(attacks);
  const fallen = attacks.filter(({search}) => search.fallen).sort((a, b) => a.search.margins.length - b.search.margins.length);
  $("verdict").textContent = attacking ? "" : `Budget ${now.eps}/255, seed ${now.seed}: ` + (fallen.length
    ? `fallen are ${fallen.map(({name, search}) => `${TITLE[name]} (query ${search.margins.length - 1})`).join(", ")}.`
    : "none has fallen.") + " One image and one seed rank nothing.";
}


// --- start ----------------------------------------------------------------------------------------

data.scenes = data.scenes.map(text => Float32Array.from(atob(text), c => c.charCodeAt(0) / 255));
data.labels.forEach((label, i) => $("scene").add(new Option(`scene ${i + 1}, ${data.classes[label]}`, i)));
Object.keys(FORMS).forEach(form => $("form").add(new Option(form)));
$("layers").insertAdjacentHTML("beforeend", [0, 1, 2, 3].map(i => `<label><input type="checkbox"> ${i}</label>`).join(""));
$("duel").innerHTML = network.names.map(name => `<figure><figcaption>${TITLE[name]}</figcaption>
  <canvas width="160" height="160" role="img"></canvas><canvas width="160" height="160" role="img"></canvas></figure>`).join("");

for (const id of ["network", "kind", "form"]) listen(id, String);
for (const id of ["scene", "amount", "n_iter", "eps"]) listen(id, Number);
listen("lambd", fromSlider);
listen("temperature", p => Number((2 ** p).toPrecision(3)));
listen("seed", x => Math.min(Math.max(Math.round(x), 0), 9999));
$("layers").addEventListener("input", () => set({layers:
  [...document.querySelectorAll("#layers input")].flatMap((box, i) => box.checked ? [i] : [])}));
$("clean").onclick = () => set({amount: 0, paint: STANDARD.paint});
$("standard").onclick = () => set({lambd: 4, n_iter: 4, form: "released", layers: [0], temperature: 1});
$("link").onclick = async () => {
  history.replaceState(null, "", fragment());
  const copied = await navigator.clipboard?.writeText(location.href).then(() => true, () => false);
  $("linked").value = (copied ? "copied" : "it stands in the address bar") + (state.scene < 0 ? "; your picture is not in it" : "");
};
$("start").onclick = attack;
$("stop").onclick = () => { attacking = false; };
$("file").onchange = event => takePicture(event.target.files[0]);
$("try").ondragover = event => event.preventDefault();
$("try").ondrop = event => { event.preventDefault(); takePicture(event.dataTransfer.files[0]); };
for (const box of [$("picture"), $("maps")]) {
  box.onpointermove = box.onpointerdown = onPointer;
  box.onkeydown = onKey;
}
addEventListener("hashchange", () => { readFragment(); changed(); });

document.documentElement.classList.add("scripted");
document.querySelectorAll(".live").forEach(section => { section.hidden = false; });
readFragment();
changed();
