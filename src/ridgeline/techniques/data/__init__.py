"""What a training run is fed, and when: sequence lengths, mixtures, schedules."""
