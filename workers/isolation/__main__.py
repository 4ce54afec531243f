"""The process of `workers.isolation.process.Process`."""

from workers.isolation.process import main

main()
