// What accounts hold before and after a transaction. The runtime gives no balances, so
// they are read from the accounts.
import { toBase58 } from './wire.js'

export const tokenPrograms = ['TokenkegQfeZyiNwAJbNbGKPFXCWuBvf9Ss623VQ5DA', 'TokenzQdBNbLqP5VEhdkAS6EPFLC1PHnBqCXEpPxuEb']

const accountLength = 165 // of a token account; Token-2022's go on with a type, then extensions
const typeAccount = 2

// tokenAccount reads a token account: {mint, owner, amount, program}, or null when the
// account is none.
export function tokenAccount (account) {
  if (account === null) return null
  const program = toBase58(account.owner())
  const data = Buffer.from(account.data())
  if (!tokenPrograms.includes(program) || data.length < accountLength) return null
  if (data.length > accountLength && data[accountLength] !== typeAccount) return null
  if (data[108] === 0) return null // not initialised
  return { mint: data.subarray(0, 32), owner: data.subarray(32, 64), amount: data.readBigUInt64LE(64), program }
}

export function uiAmount (amount, decimals) {
  const text = amount.toString().padStart(decimals + 1, '0')
  const whole = text.slice(0, text.length - decimals)
  const part = text.slice(text.length - decimals).replace(/0+$/, '')
  return {
    amount: amount.toString(),
    decimals,
    uiAmount: amount === 0n ? null : Number(amount) / 10 ** decimals,
    uiAmountString: part === '' ? whole : `${whole}.${part}`
  }
}

// mintDecimals gives undefined when there is no such mint.
export function mintDecimals (svm, mint) {
  const account = svm.getAccount(mint)
  return account === null || account.data().length < 82 ? undefined : account.data()[44]
}

// read gives {lamports: [bigint], tokens: [entry]} of the keys. Accounts that are run as
// programs (a set of indices) have no token entry.
export function read (svm, keys, programs) {
  const tokens = []
  keys.forEach((key, accountIndex) => {
    if (programs.has(accountIndex)) return
    const t = tokenAccount(svm.getAccount(key))
    const decimals = t === null ? undefined : mintDecimals(svm, t.mint)
    if (decimals === undefined) return
    tokens.push({
      accountIndex,
      mint: toBase58(t.mint),
      owner: toBase58(t.owner),
      programId: t.program,
      uiTokenAmount: uiAmount(t.amount, decimals)
    })
  })
  return { lamports: keys.map((key) => svm.getBalance(key) ?? 0n), tokens }
}
