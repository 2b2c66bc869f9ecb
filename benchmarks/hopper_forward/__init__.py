"""The forward of the Hopper kernels in each of its shapes, beside cuDNN without a bias."""
