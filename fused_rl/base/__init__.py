"""What every op and loss rests on: checks, masked reductions, the path of a device, outputs, shards."""
