"""The hooks on models, optimizers, data loaders, the compiler and the garbage collector."""
