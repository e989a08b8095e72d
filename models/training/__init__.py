"""Fine-tuning: adapters beside a model's weights, which stay as they lie, quantized or not, and steps that train them."""
