//go:build !race

package node

const raceMemory = 0
