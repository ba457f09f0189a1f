"""Ray and MLflow around the components: who works where, and what is kept."""
