//go:build !race

package ggml

const raceEnabled = false
