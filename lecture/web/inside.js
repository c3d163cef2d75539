// The view inside: answers and S at a glance; then S, residual and attention of each step of PAP.

const patches = f => Float32Array.from({length: N - 1}, (_, p) => f(p + 1));  // no class token
const norm2 = x => Math.sqrt(x.reduce((sum, xi) => sum + xi * xi, 0));
const minus = (x, ...others) => x.map((xi, i) => others.reduce((rest, y) => rest - y[i], xi));
const sumOf = x => x.reduce((a, b) => a + b, 0);

// The size of a token: the sum of absolute entries over heads and channels
function size(x, i) {
  let sum = 0;
  for (let h = 0; h < H; h++)
    for (let d = 0; d < D; d++) sum += Math.abs(x[(h * N + i) * D + d]);
  return sum;
}

// Mean entropy of the rows of A, in nats; ln 65 if attention is uniform
const entropy = A => -A.reduce((sum, a) => a > 0 ? sum + a * Math.log(a) : sum, 0) / (H * N);

// The attention of token i to token j, mean over heads
const looks = (A, i, j) => (A[i * N + j] + A[(N + i) * N + j]) / 2;

// Attention that each patch gets from the other tokens
const received = A => patches(j => {
  let sum = 0;
  for (let i = 0; i < N; i++) if (i !== j) sum += looks(A, i, j) / N;
  return sum;
});

function centred(x) {                                 // minus the mean token of each head
  return x.map((xi, at) => {
    const first = Math.floor(at / (N * D)) * N * D + at % D;
    let mean = 0;
    for (let i = 0; i < N; i++) mean += x[first + i * D] / N;
    return xi - mean;
  });
}

function fromMeanPatch(x) {                           // minus the mean over the 64 patches of each head
  return x.map((xi, at) => {
    const first = Math.floor(at / (N * D)) * N * D + at % D;
    let mean = 0;
    for (let i = 1; i < N; i++) mean += x[first + i * D] / (N - 1);
    return xi - mean;
  });
}

// The cosine of centred arrays, so that a part that all keys share does not count
function cosine(x, y) {
  const [a, b] = [centred(x), centred(y)];
  return sumOf(a.map((ai, i) => ai * b[i])) / Math.max(norm2(a) * norm2(b), 1e-12);
}

function softmax(x) {
  const e = [...x].map(xi => Math.exp(xi - Math.max(...x)));
  return e.map(ei => ei / sumOf(e));
}

// The tokens of the painted patches (token 0 is the class token)
const paintedTokens = now => [...now.paint].flatMap((digit, i) => digit === "0" ? [] : [i + 1]);

// AUC: how often a painted patch has the larger score; a tie counts half. null: nothing to compare
function auc(score, paint) {
  let wins = 0, pairs = 0;
  for (let i = 0; i < N - 1; i++)
    for (let j = 0; j < N - 1; j++) {
      if (paint[i] === "0" || paint[j] !== "0") continue;
      wins += score[i] > score[j] ? 1 : score[i] === score[j] ? 0.5 : 0;
      pairs++;
    }
  return pairs ? wins / pairs : null;
}

// The setting of the page as network.js wants it. An infinite threshold leaves S empty.
function settingOf(now) {
  const tokens = paintedTokens(now), lambd = now.empty ? Infinity : now.lambd;
  return {...now, lambd, perfect: now.perfect ? tokens : [], left_out: now.out ? tokens : []};
}

// The answers of the three networks, and four scores of each patch, over their means in this
// picture: S: |S| of PAP; real: |S| of real robust PCA on the same keys; length: |K|; distance:
// |K - mean key|. parts: |K|, |L|, |S| over the largest of all. on, off: means of the scores over
// painted and other patches. areas: AUC of each score. clean: without paint.
const withoutPaint = new Map();                       // answers to clean pictures, by setting

async function glance(now, clean) {
  const pixels = damaged(clean, now), answers = {}, inside = [], steps = [], asked = settingOf(now);
  const setting = JSON.stringify([now.scene, String(now.lambd), now.n_iter, now.form, now.layers, now.temperature]);
  if (now.scene < 0 || !withoutPaint.has(setting)) {
    const before = {}, plain = {...now, perfect: [], left_out: []};
    for (const name of network.names) before[name] = softmax(await ask(name, clean, plain));
    withoutPaint.set(setting, before);
  }
  for (const name of network.names) {
    const traced = name === "rpc" ? [inside, steps] : [];
    const answer = softmax(await ask(name, pixels, asked, ...traced));
    answers[name] = {answer, before: withoutPaint.get(setting)[name]};
  }
  const K = inside[now.layers[0] ?? 0].k, last = steps.at(-1) ?? {S: K.map(() => 0), L: K};
  const sizes = x => patches(i => size(x, i));
  const relative = x => { const mean = sumOf(x) / (N - 1); return x.map(xi => mean ? xi / mean : 0); };
  const scores = {S: relative(sizes(last.S)), real: relative(sizes(robustPca(K))),
                  length: relative(sizes(K)), distance: relative(sizes(fromMeanPatch(K)))};
  const areas = Object.fromEntries(Object.entries(scores).map(([name, score]) => [name, auc(score, now.paint)]));
  const over = keep => Object.fromEntries(Object.entries(scores).map(([name, score]) => {
    const own = score.filter((_, i) => keep(now.paint[i] !== "0"));
    return [name, own.length ? sumOf(own) / own.length : null];
  }));
  const parts = {K: sizes(K), L: sizes(last.L), S: sizes(last.S)};
  const most = Math.max(...Object.values(parts).map(part => Math.max(...part)));
  for (const name in parts) parts[name] = parts[name].map(x => x / most);
  return {now, pixels, answers, ...scores, areas, parts, empty: !sumOf(last.S.map(Math.abs)),
          on: over(x => x), off: over(x => !x)};
}

// clean: the picture without paint. Columns are the steps of PAP, or the four layers without PAP.
async function lookInside(now, clean) {
  const pixels = damaged(clean, now), inside = [], steps = [];
  const answer = softmax(await ask(now.network, pixels, settingOf(now), inside, steps));
  const result = {now, pixels, answer}, {left_out} = settingOf(now);
  if (now.network !== "rpc" || !now.layers.length) {
    const sharp = i => now.network !== "rpc" && now.layers.includes(i) ? now.temperature : 1;
    result.columns = inside.map(({q, k}, i) => ({title: `layer ${i}`, A: weights(q, k, sharp(i), left_out)}));
    result.entropies = result.columns.map(({A}) => entropy(A));
    return result;
  }
  const {k: K, v} = inside[now.layers[0]], longest = Math.max(...patches(i => size(K, i)), size(K, 0));
  result.columns = [];
  for (const [i, {S, K2, L}] of steps.entries()) {
    const left = minus(K, S, L), A = weights(K2, K2, 1, left_out);
    result.columns.push({
      title: `step ${i + 1}`, A, empty: S.every(x => x === 0), cosine: cosine(K2, K),
      S: patches(t => size(S, t) / longest), left: patches(t => size(left, t) / longest),
      residual: norm2(left) / norm2(K),
    });
    await breathe();
  }
  result.entropies = result.columns.map(({A}) => entropy(A));
  result.residuals = result.columns.map(column => column.residual);
  const symmetric = weights(K, K, 1, left_out), uniform = symmetric.map(() => 1 / N);
  const residual = A => norm2(minus(K, average(A, v))) / norm2(K);              // with S = 0
  result.nulls = {entropy: {uniform: entropy(uniform), symmetric: entropy(symmetric)},
                  residual: {uniform: residual(uniform), symmetric: residual(symmetric)}};
  return result;
}


// --- in words -------------------------------------------------------------------------------------

const percent = x => `${(100 * x).toFixed(0)} %`;
const showLambda = x => x === Infinity ? "∞" : String(x);

// The slider of lambda: 0, then 0.01 to 100 in equal steps of its logarithm, then infinity
const toSlider = x => x === 0 ? 0 : x === Infinity ? 1000
  : Math.min(Math.max(1 + 998 * (Math.log10(x) + 2) / 4, 1), 999);
const fromSlider = p => p <= 0 ? 0 : p >= 1000 ? Infinity : Number((10 ** ((p - 1) / 998 * 4 - 2)).toPrecision(3));

const where = token => `row ${Math.floor(token / 8) + 1}, column ${token % 8 + 1}`;

// "0.81 on paint, 1.02 elsewhere"
const painted = ({on, off}, score) => on[score] === null || off[score] === null ? "nothing to compare"
  : `${on[score].toFixed(2)} on paint, ${off[score].toFixed(2)} elsewhere`;

const COUNT = ["no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"];
const larger = (x, y) => Math.abs(x - y) < 0.05 ? "about as large" : x < y ? "smaller" : "larger";

// "Six patches are noise.", or "" without paint
function paintInWords(paint) {
  const digits = [...paint].filter(digit => digit !== "0"), n = digits.length;
  if (!n) return "";
  const kind = new Set(digits).size > 1 ? "painted" : ["", "noise", "black", "white", "the same noise"][digits[0]];
  const count = COUNT[n] ?? String(n), start = count[0].toUpperCase() + count.slice(1);
  return `${start} ${n === 1 ? "patch is" : "patches are"} ${kind}.`;
}

// Whether at least three patches are painted, and all of them are equal
const allEqual = paint => /^([234])\1{2,}$/.test(paint.replaceAll("0", ""));

// One to five plain sentences about this picture. A slide leaves out the details.
const details = text => `<span class="why">${text}</span>`;

function plain({now, answers, on, off, areas, empty}, classes) {
  const {answer} = answers.rpc, best = answer.indexOf(Math.max(...answer));
  const says = `RPC says ${classes[best]}, ${percent(answer[best])}.`, painting = paintInWords(now.paint);
  if (!painting) {
    const idle = now.perfect || now.empty || now.out ? "The switches below have no effect without paint. " : "";
    return `Nothing is painted. ${says} ${idle}Paint patches, and compare S there with S elsewhere.`;
  }
  const left = now.out ? "No layer attends to them. " : "";
  const patches = `${painting} ${left}${says} `;
  if (now.paint.indexOf("0") < 0) return patches + "The whole picture is painted, so there is nothing to compare.";
  if (now.perfect) return patches + "S takes everything at the painted patches. Elsewhere S is the network's own S. Does the answer change?";
  const real = `The S of real robust PCA has an AUC of ${areas.real.toFixed(2)}`;
  if (empty) return patches + `With this setting the S of RPC-Attention is empty. ${real}.`;
  const found = larger(on.S, off.S), keys = larger(on.length, off.length);
  const both = found === keys ? `The keys there are ${found}, too`
    : "The sizes of the keys";
  const law = allEqual(now.paint) ? " Robust PCA finds patches that are unlike all others. One direction describes equal patches, so they belong to L." : "";
  return patches + `S is ${found} ${found.startsWith("about") ? "there as" : "there than"} elsewhere` +
    details(`: ${painted({on, off}, "S")}. ${both}: ${painted({on, off}, "length")}. ${real}, the S of RPC-Attention ${areas.S.toFixed(2)}`) + `.${law}`;
}

// What this setting does to S and to attention, in sentences
function meaning({columns, entropies, nulls, now}) {
  if (now.perfect && now.network === "rpc")
    return "Perfect S: in each step, S takes everything at the painted patches. λ has no effect there.";
  if (now.network !== "rpc")
    return !now.layers.length || now.temperature === 1 ? "As trained: scores are q·k / √D."
      : `Scores are divided by ${now.temperature}: a ${now.temperature < 1 ? "sharper" : "flatter"} softmax.`;
  if (!nulls) return "No layer has PAP: this is symmetric attention with weights that were trained with PAP.";
  const parts = [], one = now.n_iter === 1, factors = columns.map(column => column.cosine);
  const last = entropies.at(-1), plain = nulls.entropy.symmetric;
  if (now.lambd === 0)
    return "λ = 0: the threshold is 0, so S takes everything, and all remaining keys are equal. " +
      `Attention is uniform: entropy ln 65 = ${Math.log(N).toFixed(2)}.`;
  if (columns.every(column => column.empty)) {
    parts.push("S is empty: no entry exceeds the threshold.");
    if (one) parts.push("One step with an empty S is symmetric attention.");
    else if (now.form === "admm") parts.push("In step i the keys are multiplied by about i, so the softmax becomes sharper.");
    else parts.push("In step i the keys are multiplied by about −(i − 2): by 0 in step 2. From step 4 on, the softmax is sharper.");
  } else if (one) parts.push("One step is symmetric attention with the size of every key entry limited to the threshold.");
  const turns = factors.filter((c, i) => i && c * factors[i - 1] < 0).length;
  if (turns)
    parts.push(`The keys change their sign ${turns > 1 ? `${turns} times` : "once"}: cosine with K ` +
      `${factors.map(c => c.toFixed(2)).join(", ")}. The sign has no effect on attention, because the keys are also the queries.`);
  if (Math.abs(last - plain) > 0.1)
    parts.push(`After the last step, attention is ${last < plain ? "sharper" : "flatter"} than symmetric attention: ` +
      `entropy ${last.toFixed(2)} instead of ${plain.toFixed(2)} nats.`);
  return parts.join(" ");
}

// The numbers of the last column, and the attention of one patch
function sentence({columns, entropies, residuals, now}, token) {
  const {A, S} = columns.at(-1), row = patches(j => looks(A, token + 1, j));
  const attends = `entropy ${entropies.at(-1).toFixed(2)} nats. The patch in ${where(token)} gives itself ` +
    `${percent(row[token])} of its attention, other patches ${percent(sumOf(row) - row[token])}.`;
  if (!S) return `Layer 3: ${attends}`;
  return `Step ${now.n_iter} in layer ${now.layers[0]}, λ = ${showLambda(settingOf(now).lambd)}, ${now.form}: S is ` +
    `${percent(sumOf(S) / 64)} of the longest key on average, the residual ${residuals.at(-1).toFixed(2)} of |K|, ${attends}`;
}
