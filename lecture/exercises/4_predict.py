"""4. Predict, then measure: is S where the corruption is? (in class, stop 4)

Write your predictions in place of "...". Then `python -m lecture.exercises 4` measures the AUC in
layer 0 of weights/shapes_rpc.pt. The AUC is the probability that |S| is larger on a corrupted patch
than on an intact patch. The AUC lies between 0 and 1; 0.5 means that S contains no information
about the corruption.

On paper first: S takes the part of each key entry above a threshold. What happens to |S| of a patch
if its key becomes shorter, and what if its key becomes longer? Which of the two should a few wrong
pixels do, and which an attack that moves the answer?
"""

# S of RPC-Attention after four steps. Pixels: twelve single pixels of a scene get a random colour,
# and their patches count as corrupted.
auc_of_pixels = ...

# Attacked: a block of 2 x 2 patches is changed until the answer is wrong.
auc_of_attacked = ...

# S of real robust PCA on the same keys: one step of ADMM.
auc_of_pixels_with_robust_pca = ...
auc_of_attacked_with_robust_pca = ...
