//go:build race

package node

// raceMemory is what the race detector may keep beside, in KiB.
const raceMemory = 96 << 10
