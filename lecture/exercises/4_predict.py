"""4. Predict, then measure: is S where the corruption is? (in class, stop 4)

Write your predictions in place of "...". Then `python -m lecture.exercises 4` measures the AUC. The
AUC is the probability that |S| is larger on a corrupted patch than on an intact patch, after four
steps in layer 0 of weights/shapes_rpc.pt. The AUC lies between 0 and 1; 0.5 means that S contains
no information about the corruption.

On paper first: S takes the part of each key entry above a threshold. What happens to |S| of a patch
if its key becomes shorter, and what if its key becomes longer? Which of the two should a few wrong
pixels do, and which an attack that moves the answer?
"""

# Twelve single pixels of each of 100 scenes get a random colour; their patches are corrupted.
auc_of_pixels = ...

# A block of 2 x 2 patches of each of 100 scenes is changed until the answer is wrong.
auc_of_attacked = ...
