// The live page: its state, which a link stores, its controls, and the attack.

const $ = id => document.getElementById(id);
const data = JSON.parse($("page-data").textContent);                  // {classes, scenes, labels, truth}
const EXPERT = ["network", "kind", "amount", "lambd", "n_iter", "form", "layers", "temperature"];
const state = {...STANDARD};
const game = {round: 0, asked: 0, right: 0, open: true, said: ""};    // open: this round has no guess yet
let own = null, token = 27, glanced = null, seen = null, touched = false;     // results of glance and lookInside

const unpainted = scene => scene < 0 ? own : data.scenes[scene];


// --- the state as the link's fragment, and back ---------------------------------------------------

const RANGE = {amount: [0, 1], lambd: [0, Infinity], n_iter: [1, 12], temperature: [0.25, 4], eps: [1, 12], perfect: [0, 1], empty: [0, 1], out: [0, 1]};
const WHOLE = ["scene", "n_iter", "eps", "perfect", "empty", "out"];
const KNOWN = {network: network.names, form: Object.keys(FORMS), kind: ["noise", "fog"], guess: ["larger", "smaller", "near 1", "near 0.5", "none"]};
// The address of this part: #try, or its number among the slides
const SLIDE = [...document.querySelectorAll(".talk > section")].indexOf($("try")) + 1, HERE = `#${SLIDE || "try"}`;

const isChanged = key => String(state[key]) !== String(STANDARD[key]);

function fragment() {
  return HERE + Object.keys(STANDARD).filter(isChanged).map(key => `&${key}=${state[key]}`).join("");
}

function readFragment() {                             // impossible values are ignored
  const [part, ...settings] = location.hash.split("&");
  if (part !== HERE) return;
  Object.assign(state, STANDARD);
  for (const [key, text] of new URLSearchParams(settings.join("&"))) {
    const x = Number(text), [low, high] = RANGE[key] ?? [own ? -1 : 0, data.scenes.length - 1];
    if (KNOWN[key]) { if (KNOWN[key].includes(text)) state[key] = text; }
    else if (key === "paint") { if (/^[0-4]{64}$/.test(text)) state.paint = text; }
    else if (key === "layers") state.layers = [0, 1, 2, 3].filter(i => text.includes(i));
    else if (key in STANDARD && x >= low && x <= high) state[key] = WHOLE.includes(key) ? Math.round(x) : x;
  }
  if (!state.guess && Object.keys(STANDARD).some(isChanged)) state.guess = "none";     // a prepared link asks nothing
  if (EXPERT.some(isChanged)) $("expert").open = true;
}


// --- work in slices: after 8 ms the browser may draw and react -------------------------------------

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

function drawPicture() {                              // the frame shows where the keys are
  const framed = $("expert").open || document.activeElement === $("picture");
  drawPixels($("picture"), glanced.pixels);
  drawFrames($("picture"), glanced.now.paint, framed ? token : -1);
  $("picture").setAttribute("aria-label", `the painted picture; arrow keys move, Enter paints; position: ${where(token)}, ` +
    (glanced.now.paint[token] === "0" ? "not painted" : "painted"));
}

function drawGlance() {
  const {now, S, real, distance, parts, areas} = glanced, guessed = Boolean(now.guess), focused = document.activeElement;
  drawPicture();
  const maps = {map: [S, 3, "size of S", painted(glanced, "S")],
                real: [real, 3, "size of S of real robust PCA", painted(glanced, "real")],
                distance: [distance, 3, "distance from the mean key", painted(glanced, "distance")],
                "part-K": [parts.K, 1, "size of K", ""], "part-L": [parts.L, 1, "size of L", ""], "part-S": [parts.S, 1, "size of S", ""]};
  for (const [id, [values, most, title, words]] of Object.entries(maps)) {
    drawMap($(id), values, most);
    drawFrames($(id), now.paint, -1);
    $(id).setAttribute("aria-label", `${title} on 64 patches ${words}`);
  }
  for (const id of ["S", "real"])
    $(`auc-${id}`).textContent = areas[id] === null ? "" : `AUC ${areas[id].toFixed(2)}`;
  $("guess").hidden = guessed;
  $("plain").hidden = !guessed;
  document.querySelectorAll(".after").forEach(part => { part.classList.toggle("waits", !guessed); });
  document.querySelectorAll(".before").forEach(part => { part.hidden = guessed; });
  document.querySelector(".question").textContent = question(now);
  document.querySelectorAll("#guess button").forEach(button => { button.hidden = asksRobustPca(now) !== button.value.startsWith("near"); });
  $("plain").innerHTML = guessed ? judged(glanced) + plain(glanced, data.classes) : "";
  drawScore();
  $("mean").textContent = now.perfect || now.empty || now.out ? meanInWords(data.mean) : "";
  drawAnswers($("answers"), glanced, data.classes);
  $("truth").textContent = now.scene < 0 ? "" : `The scene shows ${withArticle(data.classes[data.labels[now.scene]])}.`;
  if ($("guess").contains(focused) || $("score").contains(focused)) keepFocus(focused);
}

function keepFocus(focused) {                         // if the button is hidden now, go to the one in its place
  const buttons = document.querySelectorAll("#guess button, #next, #first");
  if (!focused.checkVisibility()) [...buttons].find(button => button.checkVisibility())?.focus({preventScroll: true});
}

const withArticle = name => `${/^[aeiou]/.test(name) ? "an" : "a"} ${name}`;

function question({paint}) {
  const number = game.round ? `Picture ${game.round + 1} of ${ROUNDS.length}. ` : "";
  const asked = asksRobustPca({paint}) ? "Robust PCA found noise so far. Is its AUC near 1 again, or near 0.5?"
    : "Is S of RPC-Attention larger there than elsewhere, or smaller?";
  return `${number}${paintInWords(paint) || "Six patches become noise."} ${asked}`;
}

// "You guessed smaller: right. " A round counts its first guess only.
function judged(seen) {
  const {guess} = seen.now;
  if (guess === "none" || seen.on.S === null || seen.off.S === null) return "";
  if (game.open) {
    const right = rightGuess(seen) === guess, said = `You guessed ${guess}: ${right ? "right" : "wrong"}. `;
    Object.assign(game, {open: false, asked: game.asked + 1, right: game.right + Number(right), said});
  }
  return game.said;
}

function drawScore() {
  const done = game.asked >= ROUNDS.length;
  $("right").textContent = game.asked ? `You were right ${game.right} of ${game.asked}. ${done ? CONCLUSION : ""}` : "";
  $("next").hidden = done || !game.asked || !state.guess;
  $("first").hidden = fragment() === HERE;
}

function nextRound() {
  Object.assign(game, {round: game.asked, open: true});
  const [scene, brush] = ROUNDS[game.round];
  set({...STANDARD, scene, paint: paintWith(brush), eps: state.eps});
}

function drawInside() {
  drawMaps($("maps"), seen, token);
  $("words").textContent = sentence(seen, token);
  const {now, residuals, entropies, nulls} = seen, kind = COLOUR[now.network], title = "entropy of attention, nats";
  $("curves").innerHTML = nulls
    ? curve("residual |K − S − L| / |K|", residuals, kind, nulls.residual, "step") + curve(title, entropies, kind, nulls.entropy, "step")
    : curve(title, entropies, kind, {uniform: Math.log(N)}, "layer");
  $("meaning").textContent = meaning(seen);
}

let busy = false, again = false;
async function changed() {                            // if the state changes meanwhile, look again
  showControls();
  drawTruth();
  again = true;
  if (busy) return;
  busy = true;
  while (again) {
    again = false;
    glanced = await glance({...state}, unpainted(state.scene));
    drawGlance();
    await breathe();
    if (!again && $("expert").open) {
      seen = await lookInside({...state}, unpainted(state.scene));
      drawInside();
    }
  }
  busy = false;
  if (touched && $("try").checkVisibility()) history.replaceState(null, "", fragment());
  document.documentElement.dataset.live = fragment();                 // tests wait for this
}


// --- controls -------------------------------------------------------------------------------------

function showControls() {
  for (const id of ["network", "scene", "kind", "amount", "n_iter", "form", "eps"]) $(id).value = state[id];
  $("lambd").value = toSlider(state.lambd);
  $("temperature").value = Math.log2(state.temperature);
  const shown = {lambd: showLambda(state.lambd), temperature: state.temperature, n_iter: state.n_iter,
                 amount: percent(state.amount)};
  for (const [id, text] of Object.entries(shown)) {
    $(`${id}-value`).value = text;
    $(id).setAttribute("aria-valuetext", text);
  }
  for (const id of ["perfect", "empty", "out"]) $(id).checked = state[id];
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
  if (state.paint[i] !== digit) set({paint: state.paint.slice(0, i) + digit + state.paint.slice(i + 1)});
}

function onPointer(event) {                           // find the patch under the pointer
  if (event.target.tagName !== "CANVAS" || !glanced) return;
  const box = event.target.getBoundingClientRect();
  const cell = x => Math.min(Math.max(Math.floor(8 * x), 0), 7);
  const next = 8 * cell((event.clientY - box.top) / box.height) + cell((event.clientX - box.left) / box.width);
  if (event.target === $("picture") && event.buttons) paint(next);
  if (next !== token) point(next);
}

function point(next) {                                // show the attention of this patch
  token = next;
  drawPicture();
  if (seen && $("expert").open) drawInside();
}

function onKey(event) {
  const step = {ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1]}[event.key];
  const inside = x => Math.min(Math.max(x, 0), 7);
  if (step) point(inside(token % 8 + step[0]) + 8 * inside(Math.floor(token / 8) + step[1]));
  else if (event.key === "Enter" || event.key === " ") paint(token);
  else return;
  event.preventDefault();
  event.stopPropagation();
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
    $("meaning").textContent = `This browser cannot read ${file.name} as a picture (${error.message}). Choose a PNG or JPEG file.`;
    return;
  }
  if (!$("scene").querySelector("[value='-1']")) $("scene").add(new Option("your picture", -1), 0);
  set({scene: -1});
}


// --- the attack: the same random search on the painted picture for three networks -------------------

const QUERIES = 200;
let attacks = [], attacking = false;

async function attack(changes) {
  const now = {...state, ...changes}, pixels = damaged(unpainted(now.scene), now), setting = settingOf(now);
  attacks = network.names.map(name => ({name, search: new SquareAttack(pixels, now.eps / 255, 0)}));
  showAttacking(true);
  let query = 0, drawn = 0;
  for (; attacking && query <= QUERIES; query++) {
    const open = attacks.filter(({search, wrong}) => !search.fallen && !wrong);
    if (!open.length) break;
    for (const one of open) {
      const logits = await ask(one.name, one.search.propose(), setting);
      one.answer = logits.indexOf(Math.max(...logits));
      one.first ??= one.answer;                       // the answer to the unchanged picture
      one.wrong ??= now.scene >= 0 && one.first !== data.labels[now.scene];
      one.search.tell(margin(logits, one.first));
    }
    if (performance.now() - drawn < 200) continue;
    drawn = performance.now();
    drawAttack(query);
  }
  showAttacking(false);
  drawAttack(Math.min(query, QUERIES));
}

function showAttacking(now) {
  attacking = now;
  document.querySelectorAll("#attack button").forEach(button => { button.disabled = now !== (button === $("stop")); });
}

function drawAttack(query) {
  $("bar").value = query;
  attacks.forEach(({name, search, first, wrong, answer}, i) => {
    const figure = $("duel").children[i], falls = search.margins.length - 1;
    const words = first === undefined ? "not attacked yet" : search.fallen
      ? `${data.classes[first]} became ${data.classes[answer]} at query ${falls}`
      : wrong ? `says ${data.classes[first]}: wrong before the attack` : `still ${data.classes[first]}`;
    const [attacked, change] = figure.querySelectorAll("canvas");
    drawPixels(attacked, search.best);
    if (search.fallen) drawCross(attacked);
    drawPixels(change, search.best, (x, i) => Math.min(Math.max(0.5 + 16 * (x - search.pixels[i]), 0), 1));
    attacked.setAttribute("aria-label", `${TITLE[name]}: ${words}`);
    change.setAttribute("aria-label", `${TITLE[name]}: the change of each pixel, 16 times enlarged`);
    figure.querySelector(".words").textContent = words;
    figure.querySelector(".margin").innerHTML = marginCurve(search.margins, QUERIES);
  });
  $("verdict").textContent = attacking ? `Query ${query} of ${QUERIES}.`
    : `After ${query} ${query === 1 ? "query" : "queries"}: ` + attacks.map(outcome).join(", ") + ".";
}

function outcome({name, search, wrong}) {
  if (wrong) return `${TITLE[name]} was wrong before the attack`;
  return `${TITLE[name]} ${search.fallen ? "is fooled" : "is not fooled"}`;
}

function drawTruth() {                                // stored accuracies at this budget
  network.names.forEach((name, i) => {
    const [mean, low, high] = data.truth[name][state.eps], clip = x => Math.min(Math.max(x, 0), 100);
    $("bars").children[i].querySelector(".stored").innerHTML = `<span class="track"><i style="width:${mean}%"></i>
      <s style="left:${clip(low)}%;width:${clip(high) - clip(low)}%"></s></span>
      <span>PGD: ${mean.toFixed(1)} % (${clip(low).toFixed(1)} to ${clip(high).toFixed(1)})</span>`;
  });
}


// --- start ----------------------------------------------------------------------------------------

data.scenes = data.scenes.map(text => Float32Array.from(atob(text), c => c.charCodeAt(0) / 255));
data.labels.forEach((label, i) => $("scene").add(new Option(`${i + 1}: ${data.classes[label]}`, i)));
Object.keys(FORMS).forEach(form => $("form").add(new Option(form)));
$("layers").insertAdjacentHTML("beforeend", [0, 1, 2, 3].map(i => `<label><input type="checkbox"> ${i}</label>`).join(""));
$("duel").innerHTML = network.names.map(name => `<figure style="--kind:${COLOUR[name]}">
  <figcaption><b>${TITLE[name]}</b> <span class="words"></span></figcaption>
  <div class="pair"><canvas width="192" height="192" role="img"></canvas><canvas width="192" height="192" role="img"></canvas></div>
  <div class="pair small"><span>attacked picture</span><span>change x 16</span></div><div class="margin"></div>
  <div class="margin small">margin at each query; below the line the answer has changed</div></figure>`).join("");
$("bars").innerHTML = network.names.map(name => `<figure style="--kind:${COLOUR[name]}">
  <figcaption>${TITLE[name]}</figcaption><div class="stored"></div></figure>`).join("");

for (const id of ["network", "kind", "form"]) listen(id, String);
for (const id of ["scene", "amount", "n_iter", "eps"]) listen(id, Number);
listen("lambd", fromSlider);
listen("temperature", p => Number((2 ** p).toPrecision(3)));
$("layers").addEventListener("input", () => set({layers:
  [...document.querySelectorAll("#layers input")].flatMap((box, i) => box.checked ? [i] : [])}));
for (const id of ["perfect", "empty", "out"]) $(id).oninput = event => set({perfect: 0, empty: 0, out: 0, [id]: Number(event.target.checked)});
document.querySelectorAll("#guess button").forEach(button => { button.onclick = () => set({guess: button.value,
  paint: state.paint === NO_PAINT ? paintWith("1") : state.paint}); });
$("next").onclick = nextRound;
$("first").onclick = () => set({...STANDARD, eps: state.eps, guess: game.asked ? "none" : ""});
$("picture").onfocus = $("picture").onblur = () => { if (glanced) drawPicture(); };
$("clean").onclick = () => set({amount: 0, paint: NO_PAINT});
$("standard").onclick = () => set({lambd: 4, n_iter: 4, form: "released", layers: [0], temperature: 1, perfect: 0, empty: 0, out: 0});
$("link").onclick = async () => {
  history.replaceState(null, "", fragment());
  const copied = await navigator.clipboard?.writeText(location.href).then(() => true, () => false);
  $("linked").value = (copied ? "copied" : "the link is in the address bar") + (state.scene < 0 ? "; it does not contain your picture" : "");
};
$("start").onclick = () => attack({});
document.querySelectorAll(".clean-scene").forEach(button => { button.onclick = () =>
  attack({scene: Number(button.value), amount: 0, paint: NO_PAINT}); });
$("stop").onclick = () => { attacking = false; };
$("file").onchange = event => takePicture(event.target.files[0]);
$("try").ondragover = event => event.preventDefault();
$("try").ondrop = event => { event.preventDefault(); takePicture(event.dataTransfer.files[0]); };
$("expert").addEventListener("toggle", changed);
for (const box of [$("picture"), $("maps")]) {
  box.onpointermove = box.onpointerdown = onPointer;
  box.onkeydown = onKey;
}
addEventListener("hashchange", () => { readFragment(); changed(); });

document.documentElement.classList.add("scripted");
document.querySelectorAll(".live").forEach(section => { section.hidden = false; });
readFragment();
changed();
