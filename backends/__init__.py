"""What runs beside the model on a GPU node: prepare conversations, extract hidden states, verify them."""

__version__ = "0.1.0"
