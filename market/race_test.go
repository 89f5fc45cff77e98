//go:build race

package market

const raceEnabled = true
