"""The operations on logits and hidden states: a public function, a registered operator and a gradient each."""
