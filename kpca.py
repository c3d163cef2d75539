"""Attention as kernel PCA: the theory of Teo & Nguyen 2024, one line of code per equation.

    python kpca.py        # print an example, each number by hand and computed; check Theorem 1

The keys k_1 ... k_N of one head are the data. k(x, y) = exp(x.y / sqrt(D)) measures the similarity
of two vectors, and g(x) = sum_j k(x, k_j). phi is the feature map with phi(x).phi(y) = k(x, y) /
(g(x) g(y)). Kernel PCA finds the axes u_d along which the centred phi(k_j) vary most. Theorem 1: if
the values are computed from these axes, softmax attention returns phi(q).u_d, the coordinates of
the query on the axes.

    Eq. 4     phi~(k_j), centred features               project_features
    Eq. 5     C u_d = lambda_d u_d, C: covariance
    Eq. 6     a_dj = phi~(k_j).u_d / (N lambda_d)
    Eq. 7     u_d = sum_j a_dj phi~(k_j)
    Eq. 10    H = [phi(q_i).u_d]
    Eq. 8     h_i(d) = sum_j a_dj phi(q_i).phi~(k_j)    theorem_1; kernel_projections
    Eq. 9     attention with values v                   theorem_1; attend
    Eq. 11    G~ a_d = N lambda_d a_d = sigma_d a_d     theorem_1; kernel_pca; eigen_cosine
    Thm. 1    v_dj = a_dj/g_j - mean_j' a_dj'/g_j       theorem_1; theoretical_values
    App. B    G~ from G (K~, K in the paper)            centre
    Eq. 12    attention with (I - S) v                  attend_scaled (attention.py learns S)
    App. E.1  S_jj' = g_j' / (N g_j)                    attend_scaled
    Eq. 13    J = mean(|phi(q)|^2 - |h|^2)              projection_error
    App. C    |phi(q)|^2 from A's first column          projection_error; log_phi2 (without A)
    Eq. 14    principal component pursuit, Alg. 2       pcp

The first part writes each equation as the paper prints it. The second part computes the same in
logarithms, where long keys do not overflow; studies/kernel_pca.py uses it. Shapes in the first
part: q (M, D), k (N, D), v (N, Dv). In the second part, any dimensions can come before these. All
numbers are float64.
"""

import math
from typing import NamedTuple

import common  # before torch, because it sets GOMP_SPINCOUNT for torch's threads
import torch

from attention import soft_threshold

ROUNDING = torch.finfo(torch.float64).eps        # relative rounding error


# --- the equations as printed ---------------------------------------------------------------------

def kernel(x, y):
    """Compute k(x_i, y_j), (M, N)."""
    return (x @ y.mT / math.sqrt(x.shape[-1])).exp()


def g(x, k):
    """Compute g(x_i), (M, 1)."""
    return kernel(x, k).sum(-1, keepdim=True)


def centre(G):
    """Return the Gram matrix of the centred features, G~ = G - 1_N G - G 1_N + 1_N G 1_N."""
    rows, columns = G.mean(-1, keepdim=True), G.mean(-2, keepdim=True)
    G = G - rows - columns + G.mean((-2, -1), keepdim=True)                 # App. B
    return (G + G.mT) / 2


def top_eigh(matrix, d):
    """Return the d largest eigenvalues, descending, and eigenvectors of a symmetric matrix."""
    eigenvalues, vectors = torch.linalg.eigh(matrix)
    return eigenvalues.flip(-1)[..., :d], vectors.flip(-1)[..., :d]


def theorem_1(q, k, d):
    """Return both sides of Theorem 1: projections on d axes and attention outputs, (M, d) each."""
    E = kernel(k, k)
    g_k = g(k, k)
    sigma, U = top_eigh(centre(E / (g_k * g_k.mT)), d)                      # Eq. 11
    a = U / sigma.sqrt()                                                    # so that |u_d| = 1
    v = (a - a.mean(0)) / g_k                                               # Thm. 1
    dots = kernel(q, k) / (g(q, k) * g_k.mT)                                # phi(q_i).phi(k_j)
    projections = (dots - dots.mean(-1, keepdim=True)) @ a                  # Eq. 8
    return projections, kernel(q, k) / g(q, k) @ v                          # Eq. 9


def features(x, k):
    """Return phi(x_i) in N coordinates of the space that phi(k_1) ... phi(k_N) span: (M, N)."""
    root = torch.linalg.cholesky(kernel(k, k))
    return kernel(x, k) @ root.inverse().mT / g(x, k)


def project_features(q, k, d):
    """Compute the projections of `theorem_1` from the features themselves, up to signs: (M, d)."""
    N = len(k)
    phi = features(k, k)
    phi = phi - phi.mean(0)                                                 # Eq. 4
    lam, u = top_eigh(phi.mT @ phi / N, d)                                  # Eq. 5
    a = phi @ u / (N * lam)                                                 # Eq. 6
    u = phi.mT @ a                                                          # Eq. 7: the same u
    return features(q, k) @ u                                               # Eq. 10


def attend_scaled(q, k, v):
    """Compute attention with the exact S of App. E.1: g (I - S) v is g v minus its mean."""
    S = g(k, k).mT / (len(k) * g(k, k))                                     # App. E.1
    return kernel(q, k) / g(q, k) @ (v - S @ v)                             # Eq. 12


def projection_error(q, k, h):
    """Return J, the mean squared distance of phi(q) to its projection, if h is the projection."""
    A = kernel(q, k) / g(q, k)
    g_q = kernel(q, k)[:, 0] / A[:, 0]                                      # App. C
    phi2 = kernel(q, q).diagonal() / g_q.square()
    return (phi2 - h.square().sum(-1)).mean()                               # Eq. 13


# --- the equations in logarithms ------------------------------------------------------------------

def log_kernel(x, y):
    """Compute log k(x_i, y_j), (..., M, N) float64.

    All functions of this part start here, so float32 vectors give float64 results, too.
    """
    return x.double() @ y.double().mT / math.sqrt(x.shape[-1])


def log_g(x, k):
    """Compute log g(x_i), (..., M)."""
    return log_kernel(x, k).logsumexp(-1)


def attend(q, k, v):
    """Compute softmax attention, h (..., M, Dv)."""
    return log_kernel(q, k).softmax(-1) @ v.double()


def log_gram(k):
    """Compute the log of the Gram matrix G_ij = phi(k_i).phi(k_j), (..., N, N)."""
    lg = log_g(k, k)
    return log_kernel(k, k) - lg[..., :, None] - lg[..., None, :]


def key_scale(k):
    """Return log g(k_j), (..., N), and c, (..., 1). The largest diagonal entry of e^c G is 1."""
    lg = log_g(k, k)
    log_diagonal = log_kernel(k, k).diagonal(dim1=-2, dim2=-1) - 2 * lg     # of G
    return lg, -log_diagonal.amax(-1, keepdim=True)


class Axes(NamedTuple):
    """Kernel PCA of the keys of every head."""
    G: torch.Tensor                     # (..., N, N) e^c G~, centred: not the G of log_gram
    sigma: torch.Tensor                 # (..., N) eigenvalues of G, descending: e^c N lambda_d
    U: torch.Tensor                     # (..., N, N) orthonormal eigenvectors of G, in columns
    rank: torch.Tensor                  # (...) number of eigenvalues above the rounding error
    c: torch.Tensor                     # (..., 1) log of the scale of G, from key_scale
    log_g: torch.Tensor                 # (..., N) log g(k_j)


def kernel_pca(k):
    """Solve the eigenvalue problem of the centred Gram matrix of every head: keys k to Axes."""
    lg, c = key_scale(k)
    N = k.shape[-2]
    G = centre((log_gram(k) + c[..., None]).exp())
    sigma, U = top_eigh(G, N)
    largest = U.abs().argmax(-2, keepdim=True)
    U = U * U.gather(-2, largest).sign()                                    # largest entry is > 0

    # Remark 2 allows N axes at most. Centring removes one axis, and rounding removes more axes if
    # keys are long.
    top = sigma[..., :1]
    resolved = (sigma > N * ROUNDING * top) & (top > N * ROUNDING)
    return Axes(G, sigma, U, resolved.sum(-1).clamp(max=N - 1), c, lg)


def coefficients(axes, d):
    """Return e^(-c/2) a_d of the first d axes, (..., N, d), with |u_d| = 1; 0 beyond the rank."""
    sigma = axes.sigma[..., :d]
    keep = torch.arange(sigma.shape[-1], device=sigma.device) < axes.rank[..., None]
    length = torch.where(keep, sigma, torch.inf).rsqrt()
    return axes.U[..., :d] * length[..., None, :]


def theoretical_values(axes, d):
    """Return the values of Theorem 1, (..., N, d), for which attention is kernel PCA."""
    a = coefficients(axes, d)                                   # the mean is 0 up to rounding
    return (axes.c / 2 - axes.log_g).exp()[..., None] * (a - a.mean(-2, keepdim=True))


def kernel_projections(q, k, axes, d):
    """Compute phi(q_i).u_d, (..., M, d), from u_d = sum_j a_dj phi~(k_j), without values."""
    t = log_kernel(q, k)
    log_w = axes.c / 2 - axes.log_g
    dots = (t - t.logsumexp(-1, keepdim=True) + log_w[..., None, :]).exp()
    return (dots - dots.mean(-1, keepdim=True)) @ coefficients(axes, d)


def log_phi2(q, k):
    """Compute log |phi(q_i)|^2, (..., M)."""
    return q.double().square().sum(-1) / math.sqrt(q.shape[-1]) - 2 * log_g(q, k)


def a_hat(v, log_g, scaled=False):
    """Recover a from values v, up to a factor, (..., N, Dv): section 2.2.2. log_g: (..., N).

    scaled=False: v = (a - mean(a)) / g, as in Theorem 1. An exact a exists only if
    sum_j g_j v_j = 0, because I - 1_N is singular. For other values, the result is g v times the
    pseudo-inverse of I - 1_N, which is I - 1_N itself.
    scaled=True: v = a / g, the values of Scaled Attention. The result is g v.
    """
    gv = (log_g - log_g.amax(-1, keepdim=True)).exp()[..., None] * v
    if scaled:
        return gv
    return gv - gv.mean(-2, keepdim=True)


def eigen_cosine(axes, a):
    """Return the cosine between each column of a and G~ a, (..., Dv): 1 only for eigenvectors."""
    Ga = axes.G @ a
    length = a.norm(dim=-2)
    rayleigh_quotient = (a * Ga).sum(-2) / length.square()      # the eigenvalue of an eigenvector
    return rayleigh_quotient * length / Ga.norm(dim=-2)


# --- robust PCA (App. D) --------------------------------------------------------------------------

def pcp(M, tol=1e-7, max_iter=None):
    """Run principal component pursuit, which PAP imitates: min ||L||_* + lambd ||S||_1, L + S = M.

    M: (N, D). Returns (L, S), each (N, D) float64. Source: the ADMM of Candes et al. 2011, with
    their lambd and mu; each step updates L before S. Line 4 of the paper's Algorithm 2 has mu, not
    1/mu, and -Y/mu, not +Y/mu; as printed, it diverges.
    tol: the steps end when |M - L - S| and the change of S are at most tol |M|. The first condition
    alone is not enough: with one gross error in M, the sum is right long before the parts are.
    max_iter: return the parts after this many steps at the latest, 1 or more. The default is no
    limit, but a ValueError after 10,000 steps.
    """
    M = M.double()
    N, D = M.shape
    lambd = 1 / math.sqrt(max(N, D))
    mu = N * D / (4 * M.abs().sum().clamp_min(1e-300))
    S = torch.zeros_like(M)                                                 # Alg. 2, line 1
    Y = torch.zeros_like(M)
    for _ in range(max_iter or 10_000):                                     # Alg. 2, line 2
        last_S = S
        U, sigma, Vt = torch.linalg.svd(M - S + Y / mu, full_matrices=False)
        L = (U * soft_threshold(sigma, 1 / mu)) @ Vt                        # Alg. 2, line 4
        S = soft_threshold(M - L + Y / mu, lambd / mu)                      # Alg. 2, line 3
        Y = Y + mu * (M - L - S)                                            # Alg. 2, line 5
        error = (M - L - S).norm()                                          # Eq. 14
        change = (S - last_S).norm()
        converged = max(error, change) <= tol * M.norm()
        if converged:
            break
    if max_iter is None and not converged:
        raise ValueError("L and S still change after 10,000 steps; scale M's gross "
                         "errors down, raise tol, or choose max_iter")
    return L, S                                                             # Alg. 2, line 7


# --- python kpca.py -------------------------------------------------------------------------------

def hand_example():
    """Yield (name, numbers by hand, computed numbers) for four keys on the axes of a plane."""
    length = math.sqrt(math.sqrt(2) * math.log(2))              # kernel values are powers of 2
    k = length * torch.tensor([[1, 0], [0, 1], [-1, 0], [0, -1]], dtype=torch.float64)
    q = length * torch.tensor([[2, 0], [1, 1], [0, 0]], dtype=torch.float64)
    axes = kernel_pca(k)
    E = kernel(k, k)
    gram = log_gram(k).exp()
    G = centre(gram)
    sigma = axes.sigma / axes.c.exp()
    a_d = coefficients(axes, 3) * (axes.c / 2).exp()
    yield "kernel values of k_1, first row of E", "2 1 1/2 1", E[0]
    yield "g(k_j), row sums of E", "9/2 9/2 9/2 9/2", g(k, k)[:, 0]
    yield "Gram matrix E / 4.5^2, first row", "8/81 4/81 2/81 4/81", gram[0]
    yield "centred, first row (App. B)", "7/162 -1/162 -5/162 -1/162", G[0]
    yield "eigenvalues sigma_d: N lambda_d (Eq. 11)", "2/27 2/27 2/81 0", sigma
    squares = a_d.square().sum(0)
    yield "|a_d|^2 = 1 / sigma_d, |u_d| = 1 (Eq. 7)", "27/2 27/2 81/2", squares
    x = torch.tensor([1, 0, -1, 0], dtype=torch.float64)
    a = x * (x.square().sum() * sigma[0]).rsqrt()               # so that |a|^2 = 1 / sigma
    yield "an axis, a = 2.598 (1, 0, -1, 0): a^2", "27/4 0 27/4 0", a.square()
    yield "  G~ a / a, where a is not 0: sigma", "2/27 2/27", (G @ a / a)[::2]
    v = a / g(k, k)[:, 0]
    yield "  v = a / g = 0.577 (1, 0, -1, 0): v^2", "1/3 0 1/3 0", v.square()
    V = theoretical_values(axes, 3)
    yield "V^T E V = I: the u_d are orthonormal", "1 0 0", (V.mT @ E @ V)[0]
    yield "|phi(q)|^2 of three queries", "0.4096 0.16 0.0625", log_phi2(q, k).exp()
    h = attend(q, k, V)
    expanded = kernel_projections(q, k, axes, 3)
    yield "|h|^2 of attention to V (Eq. 9)", "0.1848 0.06 0", h.square().sum(-1)
    yield "  by kernel expansion (Eq. 8)", "0.1848 0.06 0", expanded.square().sum(-1)
    yield "J, projection error (Eq. 13)", "0.1291", projection_error(q, k, h)

    # The value (1, 0, 0, 0) does not come from eigenvectors.
    v = torch.tensor([[1], [0], [0], [0]], dtype=torch.float64)
    a = a_hat(v, axes.log_g)
    gammas = (G @ a / (4 * a))[:, 0]
    yield "a for v = (1,0,0,0), times 4.5", "27/8 -9/8 -9/8 -9/8", 4.5 * a[:, 0]
    yield "  G~ a: not a multiple of a", "7/36 -1/36 -5/36 -1/36", 4.5 * (G @ a)[:, 0]
    yield "  gamma = G~ a / (N a)", "7/486 1/162 5/162 1/162", gammas
    differences = torch.pdist(gammas[:, None])
    yield "  mean |gamma_i - gamma_j|, near 0,", "10/729", differences.mean()
    yield "  but lambda_1 is not much larger", "1/54", sigma[0] / 4
    yield "  eig_cos^2, 1 for eigenvectors", "49/57", eigen_cosine(axes, a)[0].square()


def difference(h, other):
    """Return the largest difference as text, divided by the largest |h|; an axis has any sign."""
    largest = (h.abs() - other.abs()).abs().max()
    return f"{(largest / h.abs().max()).item():.1e}"


def main():
    common.new_parser(__doc__).parse_args()                                 # prints --help
    print("Four keys on the axes of a plane. "
          "Numbers by hand and computed are equal to 1e-12.\n")
    print(f"  {'':42s}{'by hand':29s}computed")
    for what, text, computed in hand_example():
        computed = computed.reshape(-1).round(decimals=14) + 0.0            # 1e-17 is 0
        shown = " ".join(f"{x:.4g}" for x in computed.tolist())
        print(f"  {what:42s}{text:29s}{shown}")

    random = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 65, 16, generator=random, dtype=torch.float64)
    projections, h = theorem_1(q, k, 16)
    print()
    print("Theorem 1 on 65 random keys, 16 axes: "
          "largest difference, divided by the largest |h|.\n"
          "All differences are rounding errors of float64, "
          "below 1e-11, also for long keys.\n")
    explicit = project_features(q, k, 16)
    print("  attention and projections, as printed  ", difference(h, projections))
    print("  attention and explicit features        ", difference(h, explicit))
    for size in (1, 5, 25):
        axes = kernel_pca(size * k)
        h = attend(size * q, size * k, theoretical_values(axes, 16))
        projections = kernel_projections(size * q, size * k, axes, 16)
        print(f"  in logarithms, q and k times {size:<11}", difference(h, projections))
    print("\nTo compare trained values with Theorem 1:  "
          "python -m studies.kernel_pca --ckpt out/FOLDER")


if __name__ == "__main__":
    common.run(main)
