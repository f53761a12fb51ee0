"""The store over the network: `kvtool serve`."""
