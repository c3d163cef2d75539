// Real robust PCA of keys: one step of ADMM for principal component pursuit (Candes et al. 2011).
//
//   minimise |L|_* + lambda |S|_1 so that L + S = K
//
// PAP copies this step, but replaces the line of L by attention. Names are as in kpca.pcp, and the
// result is kpca.pcp(K, max_iter=1) for each head. K and S: (H, N, D), flat. Needs network.js.

// Jacobi's method: turn two coordinates at a time until the symmetric matrix A (n x n) is diagonal.
// Returns {values (n), vectors (n, n)}; column i of vectors is the eigenvector of values[i].
function eigen(A, n) {
  const a = Float64Array.from(A), vectors = new Float64Array(n * n);
  for (let i = 0; i < n; i++) vectors[i * n + i] = 1;
  for (let sweep = 0; sweep < 40; sweep++) {
    let off = 0, all = 0;                             // sums of squares: off the diagonal, and all
    for (let i = 0; i < n * n; i++) {
      all += a[i] ** 2;
      if (i % (n + 1)) off += a[i] ** 2;
    }
    if (off <= 1e-26 * all) break;
    for (let p = 0; p < n; p++)
      for (let q = p + 1; q < n; q++) turn(a, vectors, n, p, q);
  }
  return {values: Float64Array.from({length: n}, (_, i) => a[i * n + i]), vectors};
}

// Turn coordinates p and q by the angle that makes a[p, q] zero; changes a and vectors
function turn(a, vectors, n, p, q) {
  if (a[p * n + q] === 0) return;
  const ratio = (a[q * n + q] - a[p * n + p]) / (2 * a[p * n + q]);
  const tangent = (ratio < 0 ? -1 : 1) / (Math.abs(ratio) + Math.sqrt(ratio ** 2 + 1));
  const cosine = 1 / Math.sqrt(tangent ** 2 + 1), sine = tangent * cosine;
  const mix = (x, i, j) => {
    const xi = x[i], xj = x[j];
    x[i] = cosine * xi - sine * xj;
    x[j] = sine * xi + cosine * xj;
  };
  for (let k = 0; k < n; k++) mix(a, k * n + p, k * n + q);           // columns p and q
  for (let k = 0; k < n; k++) mix(a, p * n + k, q * n + k);           // rows p and q
  for (let k = 0; k < n; k++) mix(vectors, k * n + p, k * n + q);
}

// S after one step, from S = Y = 0. The mean key of each head is subtracted first, as in every PCA.
function robustPca(K) {
  const S = new Float32Array(H * N * D), lambda = 1 / Math.sqrt(Math.max(N, D));
  for (let h = 0; h < H; h++) {
    const M = Float64Array.from(ofHead(K, h));
    for (let d = 0; d < D; d++) {
      let mean = 0;
      for (let i = 0; i < N; i++) mean += M[i * D + d] / N;
      for (let i = 0; i < N; i++) M[i * D + d] -= mean;
    }
    const sum = M.reduce((total, x) => total + Math.abs(x), 0);
    const mu = N * D / (4 * Math.max(sum, 1e-300));                   // Def. 1 with W = D
    const L = shrinkSingularValues(M, 1 / mu);                        // Alg. 2, line 4
    for (let i = 0; i < N * D; i++)
      S[h * N * D + i] = softThreshold(M[i] - L[i], lambda / mu);     // Alg. 2, line 3
  }
  return S;
}

// U max(sigma - tau, 0) V^T for M = U sigma V^T (N, D). No U is needed: M^T M = V sigma^2 V^T, so
// the result is M V f V^T with f = max(1 - tau / sigma, 0).
function shrinkSingularValues(M, tau) {
  const gram = new Float64Array(D * D), filter = new Float64Array(D * D), L = new Float64Array(N * D);
  for (let d = 0; d < D; d++)
    for (let e = 0; e < D; e++)
      for (let i = 0; i < N; i++) gram[d * D + e] += M[i * D + d] * M[i * D + e];
  const {values, vectors} = eigen(gram, D);
  values.forEach((value, j) => {
    const sigma = Math.sqrt(Math.max(value, 0)), f = sigma > tau ? 1 - tau / sigma : 0;
    for (let d = 0; d < D; d++)
      for (let e = 0; e < D; e++) filter[d * D + e] += f * vectors[d * D + j] * vectors[e * D + j];
  });
  for (let i = 0; i < N; i++)
    for (let d = 0; d < D; d++)
      for (let e = 0; e < D; e++) L[i * D + e] += M[i * D + d] * filter[d * D + e];
  return L;
}
