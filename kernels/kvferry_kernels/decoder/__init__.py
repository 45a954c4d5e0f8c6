"""All layers of a Llama decoder for one step."""
