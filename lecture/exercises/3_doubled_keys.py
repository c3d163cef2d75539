"""3. What if the keys double? (homework, stop 3)

Write your prediction in place of each ..., then `python -m lecture.exercises 3` measures it: in
layer 0 of weights/shapes_rpc.pt, on 64 scenes, with keys K and with keys 2K.

Three questions for paper: which of the two thresholds has the unit of a key? Which variant gives
S(2K) = 2 S(K) in the first step? Why does a trained network not simply choose longer keys?
"""

# The threshold tau of 2K, divided by the threshold of K.
tau_released = ...                          # variant `released`: tau = lambda * mu
tau_paper = ...                             # variant `paper`: tau = lambda / mu

# The share of entries of S that are not 0 after four steps, in %. For K: 53 and 1.4.
share_released = ...
share_paper = ...
