"""Fine-tuning: adapters beside a model's weights, which stay as they lie, and steps that train them."""
