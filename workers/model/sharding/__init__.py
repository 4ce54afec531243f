"""Parameters and layers over ranks: device mesh, FSDP2, tensor parallelism, the layers of a stage."""
