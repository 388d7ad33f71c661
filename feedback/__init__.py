"""A push program drives a frozen language model's soft-token loop; everything reported is computed
from the trajectory
that comes back."""

__version__ = "0.1.0"
