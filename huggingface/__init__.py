"""Exchange of models with other programs: folders in the layout of Hugging Face transformers."""
