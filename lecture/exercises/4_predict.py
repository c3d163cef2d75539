"""4. Predict, then measure: is S where the corruption is? (homework, stop 4)

Write your predictions in place of "...". Then `python -m lecture.exercises 4` measures the AUC in
layer 0 of weights/shapes_rpc.pt, on 100 scenes with six corrupted patches each. The AUC is the
probability that |S| is larger on a corrupted patch than on an intact patch. The AUC lies between 0
and 1; 0.5 means that S contains no information about the corruption.

On paper first: S of RPC-Attention follows the size of the key. S of robust PCA is large where a few
directions, which describe most keys well, describe a key badly. Apply both rules to each corruption.
"""

# Grey noise: each pixel of a patch gets a random grey level instead of a random colour.
# S of RPC-Attention after four steps; S of real robust PCA on the same keys, one step of ADMM.
auc_of_grey_noise = ...
auc_of_grey_noise_with_robust_pca = ...

# Pasted: each patch is replaced by the patch at the same place in the next scene.
auc_of_pasted = ...
auc_of_pasted_with_robust_pca = ...
