"""Register classes in the pytree tables of torch, optree and JAX, and restore earlier registrations."""
