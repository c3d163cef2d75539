// The nano network of vit.py and the attentions of attention.py in plain JavaScript: no library.
//
// Names and equation numbers are as in attention.py. Every array is flat, a Float64Array:
// tokens x (N, C); q, k, v, S, K2, L, Z, h (H, N, D); attention A (H, N, N).
// N = 65 tokens (class token first), C = 64 channels, H = 2 heads of width D = 32.
//
//   network.run("rpc", pixels, {form: "released", lambd: 4, n_iter: 4, layers: [0]})
//
// pixels: 3,072 numbers in [0, 1], channel first. Returns {logits, steps: [{S, K2, L}, ...]}.
// Two settings need a list of tokens, for example perfect: [7, 8]. perfect: the threshold of these
// tokens is 0, so S takes everything there. left_out: no token attends to these tokens, in any layer.

const FORMS = {
  released: {threshold: "times", mu_dim: "model", dual_sign: -1},     // the authors' code
  paper: {threshold: "over", mu_dim: "head", dual_sign: -1},          // Algorithm 1 as printed
  admm: {threshold: "over", mu_dim: "head", dual_sign: +1},           // with the sign of ADMM
};
const N = 65, C = 64, H = 2, D = 32, DEPTH = 4, PATCH = 4, SIDE = 32, EPS = 1e-6;


// --- softmax and symmetric attention: a token attends to tokens whose keys fit its query ---------

// Eq. 2: A = softmax(q k^T / sqrt(D)); a row sums to 1. A temperature above 1 flattens it.
// left_out: tokens that get no attention
function weights(q, k, temperature = 1, left_out = []) {
  const A = new Float64Array(H * N * N), scale = 1 / (Math.sqrt(D) * temperature), zero = new Float64Array(N);
  for (let h = 0; h < H; h++) A.set(linear(ofHead(q, h), ofHead(k, h), zero), h * N * N);       // scores
  for (let i = 0; i < H * N; i++) {                   // row i: head h, token i - h N
    const row = A.subarray(i * N, (i + 1) * N);
    let largest = -Infinity, sum = 0;
    for (const j of left_out) row[j] = -Infinity;
    for (let j = 0; j < N; j++) largest = Math.max(largest, row[j] *= scale);
    for (let j = 0; j < N; j++) sum += row[j] = Math.exp(row[j] - largest);
    for (let j = 0; j < N; j++) row[j] /= sum;
  }
  return A;
}

// Eq. 3: h_i = sum_j a_ij v_j
function average(A, v) {
  const h = new Float64Array(H * N * D), zero = new Float64Array(D), columns = new Float64Array(D * N);
  for (let head = 0; head < H; head++) {
    for (let i = 0; i < N * D; i++) columns[i % D * N + Math.floor(i / D)] = v[head * N * D + i];
    h.set(linear(A.subarray(head * N * N, (head + 1) * N * N), columns, zero), head * N * D);
  }
  return h;
}

const ofHead = (x, h) => x.subarray(h * N * D, (h + 1) * N * D);

function softmaxAttention(q, k, v, temperature, left_out) {
  return average(weights(q, k, temperature, left_out), v);
}


// --- RPC-Attention: Principal Attention Pursuit (PAP) splits the keys, K = L + S ------------------

// S_tau: sign(x) max(|x| - tau, 0)
function softThreshold(x, tau) {
  return x - Math.min(Math.max(x, -tau), tau);
}

// Def. 1: mu = N x / (4 sum|K|), one number per head; x = C ("model") or D ("head").
// The sum is over the tokens that are not left out, and N is their number.
function penalty(K, mu_dim, left_out = []) {
  const skip = new Set(left_out);
  return Array.from({length: H}, (_, head) => {
    let sum = 0;
    for (let i = head * N * D; i < (head + 1) * N * D; i++)
      if (!skip.has(Math.floor(i / D) % N)) sum += Math.abs(K[i]);
    const mean = sum / ((N - skip.size) * D), heads = mu_dim === "model" ? H : 1;     // x / D
    return heads / (4 * Math.max(mean, 1e-12));
  });
}

// n_iter steps on keys K; returns the last L. trace: an array that receives {S, K2, L} of each step.
function rpcAttention(K, v, {n_iter, lambd, form, perfect, left_out}, trace) {
  const {threshold, mu_dim, dual_sign} = FORMS[form], zeros = () => new Float64Array(H * N * D);
  const tau = penalty(K, mu_dim, left_out).map(mu => threshold === "times" ? lambd * mu : lambd / mu);
  const all = new Set(perfect);                       // perfect S takes everything at these tokens

  // Each step splits the keys: S takes the part of each entry above tau; L is the attention output
  // for the remainder. Z sums the part of K that L + S misses, and pushes the next step there.
  let L = zeros(), Z = zeros();                       // Alg. 1, line 1: S = Y = 0, and L = 0
  for (let step = 0; step < n_iter; step++) {         // Alg. 1, line 2: Def. 1 says n steps
    const S = zeros(), rest = zeros(), K2 = zeros(), next = zeros();
    for (let i = 0; i < H * N * D; i++) {
      const limit = all.has(Math.floor(i / D) % N) ? 0 : tau[Math.floor(i / (N * D))];
      S[i] = softThreshold(K[i] - L[i] + Z[i], limit);        // line 3: S = S_tau(K - L + Y/mu)
      rest[i] = K[i] - S[i];                          // Eq. 14: L + S = K, so L should become K - S
      K2[i] = rest[i] + dual_sign * Z[i];             // K - S - Y/mu, the keys of line 4
    }
    L = softmaxAttention(K2, K2, v, 1, left_out);     // Alg. 1, line 4
    for (let i = 0; i < H * N * D; i++)
      next[i] = rest[i] + Z[i] - L[i];                // Alg. 1, line 5: Y = Y + mu (K - L - S)
    Z = next;
    if (trace) trace.push({S, K2, L});
  }
  return L;                                           // Alg. 1, line 7: output L
}


// --- vit.py: patches to tokens, blocks, head -----------------------------------------------------

// x (n, width) times weight (outputs, width) plus bias: (n, outputs). For speed, the loop takes
// four tokens and two outputs at a time. So rows of zeros fill x up to a multiple of four tokens, and
// an odd last output is computed twice.
function linear(x, weight, bias) {
  const outputs = bias.length, width = weight.length / outputs, n = x.length / width;
  const rows = 4 * Math.ceil(n / 4), y = new Float64Array(rows * outputs);
  const X = new Float64Array(rows * width);         // x, then zeros
  X.set(x);
  for (let o = 0; o < outputs; o += 2) {
    const w = o * width, next = Math.min(o + 1, outputs - 1), u = next * width;
    for (let i = 0; i < rows; i += 4) {
      const p = i * width, q = p + width, r = q + width, s = r + width, at = i * outputs + o, to = i * outputs + next;
      let a = bias[o], b = a, c = a, d = a, e = bias[next], f = e, g = e, h = e;
      for (let j = 0; j < width; j++) {
        const first = weight[w + j], second = weight[u + j];
        a += first * X[p + j]; b += first * X[q + j]; c += first * X[r + j]; d += first * X[s + j];
        e += second * X[p + j]; f += second * X[q + j]; g += second * X[r + j]; h += second * X[s + j];
      }
      [y[at], y[at + outputs], y[at + 2 * outputs], y[at + 3 * outputs]] = [a, b, c, d];
      [y[to], y[to + outputs], y[to + 2 * outputs], y[to + 3 * outputs]] = [e, f, g, h];
    }
  }
  return y.subarray(0, n * outputs);
}

// LayerNorm: each token's channels to mean 0 and variance 1, then scale and shift
function norm(x, weight, bias) {
  const y = new Float64Array(x.length);
  for (let i = 0; i < x.length; i += C) {
    let mean = 0, variance = 0;
    for (let c = 0; c < C; c++) mean += x[i + c] / C;
    for (let c = 0; c < C; c++) variance += (x[i + c] - mean) ** 2 / C;
    const scale = 1 / Math.sqrt(variance + EPS);
    for (let c = 0; c < C; c++) y[i + c] = (x[i + c] - mean) * scale * weight[c] + bias[c];
  }
  return y;
}

// x P(X < x) of a standard normal X. Its erf: Abramowitz and Stegun 7.1.26, error below 1.5e-7.
function gelu(x) {
  const z = Math.abs(x) / Math.SQRT2, t = 1 / (1 + 0.3275911 * z);
  const tail = ((((1.061405429 * t - 1.453152027) * t + 1.421413741) * t - 0.284496736) * t
                + 0.254829592) * t * Math.exp(-z * z);                        // 1 - erf(z)
  return x * (x > 0 ? 1 - tail / 2 : tail / 2);
}

// Normalised pixels (3, 32, 32) to class token and patches, row by row, plus positions: (N, C)
function embed(w, pixels, mean, std) {
  const across = SIDE / PATCH, patches = new Float64Array((N - 1) * 3 * PATCH * PATCH);
  let to = 0;
  for (let p = 0; p < N - 1; p++)
    for (let c = 0; c < 3; c++)
      for (let y = 0; y < PATCH; y++)
        for (let x = 0; x < PATCH; x++) {
          const row = Math.floor(p / across) * PATCH + y, column = (p % across) * PATCH + x;
          patches[to++] = (pixels[(c * SIDE + row) * SIDE + column] - mean[c]) / std[c];
        }
  const tokens = new Float64Array(N * C);
  tokens.set(w["cls_token"]);
  tokens.set(linear(patches, w["patch_embed.proj.weight"], w["patch_embed.proj.bias"]), C);
  return tokens.map((x, i) => x + w["pos_embed"][i]);
}

// Eq. 1: (N, C) to q, k, v, each (H, N, D); weight: rows for q, k, v, or only for k, v
function project(x, weight, bias) {
  const qkv = linear(x, weight, bias), parts = bias.length / C;
  const [q, k, v] = [0, parts - 2, parts - 1].map(part => {
    const out = new Float64Array(H * N * D);
    for (let h = 0; h < H; h++)
      for (let i = 0; i < N; i++)
        for (let d = 0; d < D; d++)
          out[(h * N + i) * D + d] = qkv[(i * parts + part) * C + h * D + d];
    return out;
  });
  return {q, k, v};
}

// (H, N, D) to (N, C)
function joinHeads(h) {
  const out = new Float64Array(N * C);
  for (let i = 0; i < N; i++)
    for (let c = 0; c < C; c++) out[i * C + c] = h[(Math.floor(c / D) * N + i) * D + c % D];
  return out;
}

const plus = (x, y) => x.map((xi, i) => xi + y[i]);

// The forward pass of one image. A generator: it pauses after each block, so that the page can
// draw in between. kind: "softmax", "symmetric" or "rpc". layers: the numbers, from 0, of the layers
// with PAP (rpc) or with the temperature (softmax, symmetric). inside: an array that receives
// {q, k, v} per layer. steps: an array that receives the steps of PAP in the first of `layers`; a
// network without PAP gives the steps that PAP would take there.
function* forward(net, kind, pixels, setting, inside, steps) {
  const {layers, temperature} = setting, w = net.weights;
  let x = embed(w, pixels, net.mean, net.std);
  for (let i = 0; i < DEPTH; i++) {
    const of = name => [w[`blocks.${i}.${name}.weight`], w[`blocks.${i}.${name}.bias`]];
    const {q, k, v} = project(norm(x, ...of("norm1")), ...of("attn.qkv"));
    const chosen = layers.includes(i), traced = i === layers[0] ? steps : null;
    let h;
    if (kind === "rpc" && chosen) {
      h = rpcAttention(k, v, setting, traced);
    } else {
      h = softmaxAttention(q, k, v, chosen && kind !== "rpc" ? temperature : 1, setting.left_out);
      if (traced) rpcAttention(k, v, setting, traced);
    }
    if (inside) inside.push({q, k, v});
    const shown = i === DEPTH - 1 ? C : N * C;        // the head reads the class token alone
    x = plus(x.subarray(0, shown), linear(joinHeads(h).subarray(0, shown), ...of("attn.proj")));
    const hidden = linear(norm(x, ...of("norm2")), ...of("mlp.fc1"));
    x = plus(x, linear(hidden.map(gelu), ...of("mlp.fc2")));
    yield;
  }
  const last = norm(x, w["norm.weight"], w["norm.bias"]);
  return linear(last, w["head.weight"], w["head.bias"]);
}


// --- the shipped networks, from the page's data --------------------------------------------------

// base64 of little-endian 16-bit floats to a Float64Array
function unpackHalf(text) {
  const bytes = Uint8Array.from(atob(text), c => c.charCodeAt(0)), value = new Float64Array(65536);
  for (let bits = 0; bits < 65536; bits++) {
    const exponent = bits >> 10 & 31, part = bits & 1023;             // no infinities are stored
    value[bits] = (bits >> 15 ? -1 : 1) * (exponent ? (1 + part / 1024) * 2 ** (exponent - 15)
                                                    : part * 2 ** -24);
  }
  return Float64Array.from(new Uint16Array(bytes.buffer), bits => value[bits]);
}

function unpackNetwork({tensors, half, mean, std}) {
  const all = unpackHalf(half), weights = {};
  let at = 0;
  for (const [name, size] of tensors) weights[name] = all.subarray(at, at += size);
  return {weights, mean, std};
}

globalThis.network = (() => {
  const stored = JSON.parse(document.getElementById("networks").textContent), ready = {};
  const standard = {form: "released", lambd: 4, n_iter: 4, layers: [0], temperature: 1};
  const start = (name, pixels, setting, inside, steps) => {
    ready[name] ??= unpackNetwork(stored[name]);
    const layers = [...(setting.layers ?? standard.layers)].sort();
    return forward(ready[name], name, pixels, {...standard, ...setting, layers}, inside, steps);
  };
  const run = (name, pixels, setting = {}) => {
    const steps = [], pass = start(name, pixels, setting, null, steps);
    let now = pass.next();
    while (!now.done) now = pass.next();
    const plain = ({S, K2, L}) => ({S: [...S], K2: [...K2], L: [...L]});
    return {logits: [...now.value], steps: steps.map(plain)};
  };
  return {start, run, names: Object.keys(stored)};
})();
