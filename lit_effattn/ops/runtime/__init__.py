"""How kernels are chosen, compiled and registered, whatever they compute."""
