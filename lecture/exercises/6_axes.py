"""6. Predict, then measure: how many axes does an image need? (appendix A)

Appendix A: in layer 0, head 0 of the symmetric network, the keys of one scene need 15 of 64 axes
for 90 % of the variance of their features. Write your predictions in place of "...". Then
`python -m lecture.exercises 6` measures the numbers for two other images.

On paper first: which tokens have similar keys in a black image, and which in an image of noise?
A key also depends on the position of its patch.
"""

# An image that is black everywhere.
axes_of_black = ...

# An image of random pixels.
axes_of_noise = ...
