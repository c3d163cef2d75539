"""3. What if the keys double? (homework, stop 3)

Write your predictions in place of "...". Then `python -m lecture.exercises 3` measures the true
numbers in layer 0 of weights/shapes_rpc.pt, on 64 scenes, with keys K and with keys 2K.

Answer three questions on paper. Which threshold has the unit of a key, lambda * mu or lambda / mu?
Which variant gives S(2K) = 2 S(K) in the first step? Why does a trained network not simply choose
longer keys?
"""

# The threshold tau of 2K, divided by the threshold of K.
tau_released = ...                          # variant `released`: tau = lambda * mu
tau_paper = ...                             # variant `paper`: tau = lambda / mu

# The share of entries of S that are not 0 after four steps with keys 2K, in %. With keys K, the
# share is 53 (`released`) and 1.4 (`paper`).
share_released = ...
share_paper = ...
